"""Copies of rectangles, and of columns, between matrices."""
