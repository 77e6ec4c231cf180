"""Fused optimizers of embedding tables."""

from torchembed.optim.clipping import clip_grad_norm_
from torchembed.optim.fused import FusedOptimizer
from torchembed.optim.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad

__all__ = ["SGD", "Adagrad", "Adam", "FusedOptimizer", "RowwiseAdagrad", "clip_grad_norm_"]
