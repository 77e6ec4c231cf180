"""Answers from trained models: rows looked up through levels of memory, and the dense part."""
