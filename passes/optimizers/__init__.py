"""Optimizers: how a parameter follows its gradient."""
