"""The library beside others: optional packages, timm, and param groups that other libraries make."""
