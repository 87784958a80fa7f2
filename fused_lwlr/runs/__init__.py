"""A training in a folder: its records, screen output and report."""
