"""How a model is trained: the recipe, the steps, evaluation, ranks, checkpoints."""
