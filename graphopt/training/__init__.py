"""Train by epochs and batches: `fit`, metrics and a scikit-learn estimator. Imports everything but `cli`."""
