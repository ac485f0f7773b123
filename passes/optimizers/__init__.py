"""Define optimizers, which update parameters by their gradients."""
