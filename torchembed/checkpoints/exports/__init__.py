"""Exports of whole models, and of what has changed in one since its last export."""
