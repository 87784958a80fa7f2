"""Statistics of the layers of any model, with or without an optimizer."""
