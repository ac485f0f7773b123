"""Check a training graph at its first step without sharing what made it: against its file and its own forward pass."""
