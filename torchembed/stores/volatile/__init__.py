"""Stores of a bounded number of rows: what may be set of them, and the one in host memory."""
