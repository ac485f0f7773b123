"""Lower a training graph to the machine at hand."""
