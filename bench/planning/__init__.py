"""Predictions: plans, the cost model's times, and the least time that a step can take."""
