"""Fused optimizers: of embedding tables, and of dense parameters."""

from torchembed.optim.clipping import clip_grad_norm_
from torchembed.optim.dense import DenseOptimizer
from torchembed.optim.dense_optimizers import DenseAdagrad, DenseAdam, DenseSGD
from torchembed.optim.fused import FusedOptimizer
from torchembed.optim.grad_scaler import GradScaler
from torchembed.optim.joint import JointOptimizer, SplitParameters, split_parameters
from torchembed.optim.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "DenseAdagrad",
    "DenseAdam",
    "DenseOptimizer",
    "DenseSGD",
    "FusedOptimizer",
    "GradScaler",
    "JointOptimizer",
    "RowwiseAdagrad",
    "SplitParameters",
    "clip_grad_norm_",
    "split_parameters",
]
