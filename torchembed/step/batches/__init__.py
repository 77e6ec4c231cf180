"""Batches on their way to a step: their layouts, reading ahead, buffers, preparation."""
