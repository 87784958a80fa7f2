"""Data sets, small models, a training loop and the demo behind the `fused-lwlr` command."""
