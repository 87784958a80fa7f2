"""Statistics of the layers of any model, without an optimizer."""
