"""The recipes that come with graphopt: Hydra configs, a folder a group."""
