"""Compose recipes with Hydra, check that they name no code or file that they may not name, and build their parts."""
