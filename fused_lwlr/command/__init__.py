"""The command `fused-lwlr`: a file for each command, their options, and how errors are shown."""
