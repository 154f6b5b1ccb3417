"""What computes a step: the shared model, the gradient matrix, backward passes."""
