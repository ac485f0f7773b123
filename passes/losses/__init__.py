"""Losses: what a prediction costs, given its target.

A leaf of the base class is its mathematics, `compare(op, prediction, target)`.
"""
