"""What is measured: `python -m bench`, see README.md in this folder."""
