"""Whole trainings: the model at its full size, and what precisions learn."""
