"""Networks to train, by name."""
