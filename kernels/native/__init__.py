"""Triton's kernels on a CPU: their first intermediate language, translated to C."""
