"""Configurations of runs of sequence models."""

import dataclasses
import enum
from pathlib import Path

from recipes.precision import Precision


class Encoder(enum.Enum):
    """Encoders of histories."""

    SASREC = "SASRec"
    HSTU = "HSTU"


class CandidateModel(enum.Enum):
    """Models that are trained on candidates."""

    DIN = "DIN"
    TWO_TOWER = "two towers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that all runs of sequence models have: one training for each seed; the result is
    their mean."""

    # A string first: the command line takes the first that fits, and a Path takes a slash of URLs.
    data: str | Path | None = None
    """The folder of the data, as published, or its URL; without it TORCHEMBED_DATA, or
    ../shared/data beside the checkout."""
    output: Path | None = None
    """A folder for checkpoints and pictures; without it runs/<recipe>-<time>."""
    seeds: tuple[int, ...] = (1,)
    epochs: int = 101
    evaluate_every: int = 20
    """Rank the held-out items after so many epochs, and after the last."""
    max_length: int = 200
    """Most items of a history, the newest."""
    embedding_dim: int = 50
    temperature: float = 0.05
    """Temperature of softmaxes over items."""
    embedding_std: float = 0.02
    """Standard deviation of the item table's initial values, which are normal, cut at two of it."""
    batch_size: int = 128
    """Histories a step, over all ranks."""
    learning_rate: float = 0.001
    """Learning rate of Adam, for the item table and all else."""
    precision: Precision = Precision.FP32
    """Precision of all but weights, losses and rankings, which are float32."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different and at least one, got {self.seeds}")
        for name in ("epochs", "evaluate_every", "max_length", "embedding_dim", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(RunConfig):
    """A run of an encoder of histories, wholly."""

    encoder: Encoder = Encoder.SASREC
    num_blocks: int = 2
    num_heads: int = 1
    dropout: float = 0.2
    num_negatives: int = 128
    """Items drawn for each position of a history."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateConfig(RunConfig):
    """A run of a model of candidates, wholly: an epoch has a sample for each item that followed
    another."""

    model: CandidateModel
    epochs: int = 5
    evaluate_every: int = 5
    max_length: int = 50
    embedding_dim: int = 32
    batch_size: int = 2048
    layer_sizes: tuple[int, ...]
    """Widths of DIN's last layers, or of the layers of each tower."""
    attention_sizes: tuple[int, ...] = (80, 40)
    """Widths of DIN's layers that weigh the items of a history."""
    corrects_sampling: bool = True
    """Subtract from the scores of the two towers' softmax how often each item is in a batch."""
