"""Rows of whole tables, in and out by key."""
