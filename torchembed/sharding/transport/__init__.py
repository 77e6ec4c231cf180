"""Exchanges of ids, vectors and gradients between ranks: tensors and collectives."""
