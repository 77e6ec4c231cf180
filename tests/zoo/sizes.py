"""Sizes of the zoo's models and batches."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model and its batches.

    Attributes:
        batch_size: samples ``B`` of a batch.
        num_features: sparse features ``F`` of a click; each has a table.
        num_rows: rows of each table.
        dim: columns ``D`` of a row; even.
        num_dense: dense features of a click.
        history: ids of a user's history.
        hidden: width of hidden layers.
        device: of models and batches.
    """

    batch_size: int
    num_features: int
    num_rows: int
    dim: int
    num_dense: int
    history: int
    hidden: int
    device: torch.device


def tiny(device: torch.device) -> Sizes:
    """Sizes that train in milliseconds on one core."""
    return Sizes(
        batch_size=8,
        num_features=4,
        num_rows=40,
        dim=8,
        num_dense=3,
        history=5,
        hidden=16,
        device=device,
    )


def large(device: torch.device) -> Sizes:
    """Sizes at which a GPU has work to do."""
    return Sizes(
        batch_size=2048,
        num_features=20,
        num_rows=1_000_000,
        dim=64,
        num_dense=13,
        history=50,
        hidden=256,
        device=device,
    )
