"""Recipes of training with large batches: presets, data, the loop, and the folder in which a run is kept."""
