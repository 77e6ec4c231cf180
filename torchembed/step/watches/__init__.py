"""Watches for what captured steps would miss: Python values, hooks, random numbers, results."""
