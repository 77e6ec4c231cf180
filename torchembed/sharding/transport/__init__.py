"""Ids to the ranks that hold their rows, vectors and gradients back: tensors and collectives."""
