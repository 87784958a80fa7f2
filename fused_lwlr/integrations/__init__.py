"""Support for other libraries: optional packages, timm, TensorBoard, and param groups that they make."""
