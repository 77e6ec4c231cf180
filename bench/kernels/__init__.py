"""Lookups and row updates alone, on a GPU and on the CPU, and how long a GPU takes."""
