"""Configuration of a run of a model of clicks on a small data set."""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import nn

from recipes.dynamic import DEFAULT_EVICTION, DEFAULT_SHARED, Eviction, check_dynamic
from recipes.precision import Precision, WireDtype
from torchembed import EmbeddingBagCollection
from torchembed.sharding import Placement


class Collections(Protocol):
    """Makes collections with a table for each feature."""

    def __call__(self, embedding_dim: int, suffix: str = "") -> EmbeddingBagCollection:
        """One whose tables have ``embedding_dim`` columns, and names that end with ``suffix``."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStoppedConfig:
    """Settings of runs that train until the score on the validation rows no longer improves."""

    # A string first: the command line takes the first that fits, and a Path takes a slash of URLs.
    data: str | Path | None = None
    """The folder of the data, as published, or its URL; without it TORCHEMBED_DATA, or
    ../shared/data beside the checkout."""
    output: Path | None = None
    """A folder for checkpoints and pictures; without it runs/<recipe>-<time>."""
    seeds: tuple[int, ...] = (1, 2, 3)
    embedding_dim: int = 16
    embedding_std: float = 0.05
    """Standard deviation of the tables' normal initial values."""
    placement: Placement | None = None
    """Placement of every table over several ranks; without it the plan chooses."""
    precision: Precision = Precision.FP32
    """Precision of all but weights and losses, which are float32."""
    wire_forward: WireDtype = WireDtype.OWN
    """Dtype in which several ranks send each other looked-up vectors."""
    wire_backward: WireDtype = WireDtype.OWN
    """Dtype in which they send the gradients of these."""
    batch_size: int = 4096
    """Samples a step, over all ranks."""
    learning_rate: float = 0.001
    """Learning rate of Adam, for tables and dense layers."""
    lr_decay: float = 0.1
    """The learning rate is multiplied by this after an epoch that did not improve."""
    patience: int = 2
    """Stop after so many epochs in a row without a better score on the validation rows: an AUC, or
    R² where numbers are predicted."""
    min_improvement: float = 1e-4
    """Least increase of the score that counts as better."""
    max_epochs: int = 100

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different and at least one, got {self.seeds}")
        for name in ("batch_size", "patience", "max_epochs", "embedding_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("embedding_std", "learning_rate", "lr_decay", "min_improvement"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be a number of at least 0, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CtrConfig(EarlyStoppedConfig):
    """A run, wholly: one training for each seed, stopped early; the result is their mean.

    Each model has a subclass, with its structure.
    """

    title: ClassVar[str]
    """The model's name."""

    embedding_l2: float = 0.0
    """Penalty ``l2 / 2 * sum of squares`` on all rows of all tables; in dynamic tables of a given
    capacity on the rows that a step looks up."""
    dynamic: bool = False
    """Look up the data's own ids in dynamic tables."""
    capacity: float | None = None
    """Rows of each table, for each of the field's distinct ids: with 0.3 as many as 30 % of them.
    The data's own ids are taken modulo the rows, but for dynamic tables, which evict. Without it
    each id has a row."""
    eviction: Eviction = DEFAULT_EVICTION
    """Whose row goes where a dynamic table is full."""
    shared: float = DEFAULT_SHARED
    """Part of the rows of a dynamic table of a given capacity that the ids without a row of their
    own share by a hash; with 0 they are looked up as zeros."""
    beside_modulo: bool = True
    """Train static tables of as many rows, which take the ids modulo these, beside dynamic ones of
    a given capacity, and state both."""
    max_grad_norm: float | None = None
    """Bound of the norm of all gradients together; without it they are not clipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dynamic(
            is_dynamic=self.dynamic,
            capacity=self.capacity,
            eviction=self.eviction,
            shared=self.shared,
        )

    def build(self, collections: Collections, num_dense: int, device: torch.device) -> nn.Module:
        """The model, with dense parameters on ``device``.

        Args:
            collections: makes its collections.
            num_dense: number of dense features.
            device: of the dense parameters.
        """
        raise NotImplementedError
