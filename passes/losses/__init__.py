"""Define losses: the cost of a prediction, given its target."""
