"""A training in a folder: what it records, shows and reports."""
