"""The benchmarks: `python -m bench`, see README.md in this folder."""
