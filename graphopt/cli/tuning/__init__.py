"""Train a model file on a folder or a file of data, by a recipe that is proposed: `graphopt tune`."""
