"""Gradients of rows between backward and the optimizer's step."""
