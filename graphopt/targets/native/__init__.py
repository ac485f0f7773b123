"""Lower a training graph to the machine: find clusters of nodes, write them in C, compile. Imports `graph`."""
