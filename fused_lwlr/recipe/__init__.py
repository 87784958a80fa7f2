"""Recipes of large-batch training on ImageNet and the like, run from one configuration."""
