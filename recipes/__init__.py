"""Runs of known models on known data, each from one command: ``python -m recipes.train``."""
