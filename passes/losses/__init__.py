"""Define losses: the cost of a prediction, given its target.

A subclass of the base class implements `compare(op, prediction, target)`.
"""
