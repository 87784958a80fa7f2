"""Large-batch ImageNet training: presets, data, the loop, and the folder in which a run is kept."""
