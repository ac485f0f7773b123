"""Cut a training graph into parts that run one after another: halves, stages, the graphs of a layer."""
