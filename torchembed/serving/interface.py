"""What servers ask of models, whatever protocol a request came by."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TensorForm:
    """What a request or an answer has under a name."""

    name: str
    dtype: np.dtype
    """Of numpy; objects for strings of bytes."""
    shape: tuple[int, ...]
    """-1 stands for any length."""


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """What a version of a model takes and gives."""

    name: str
    version: str
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]


class Answer(NamedTuple):
    """The result of one request, all of it of one version of the model."""

    outputs: dict[str, np.ndarray]
    """By name: those that were asked for."""
    version: str
    num_default_rows: int
    """How many ids of the request had no row to hand, and were given their table's default."""


class InvalidRequestError(ValueError):
    """The request does not fit the model; its sender must change it."""


class OutdatedUpdateError(ValueError):
    """An update is of a version before the one that was deployed."""


class UnknownModelError(LookupError):
    """There is no model of that name, or no such version of it."""


class ModelNotReadyError(RuntimeError):
    """The model is there and cannot answer now: it is being loaded, or loading it failed."""


class BusyError(RuntimeError):
    """As many requests are under way or wait as may, or the server is about to end; ask again later
    or elsewhere."""


class ModelState(enum.Enum):
    """Whether a version of a model answers; values are those of the repository index."""

    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class IndexEntry(NamedTuple):
    """A version of a model, as the index of all models has it."""

    name: str
    version: str
    """Empty for a model that is not loaded."""
    state: ModelState
    reason: str
    """Why it is unavailable; empty where it is not."""


class ServedModel(Protocol):
    """A version of a model that answers. Any number of threads may ask at once."""

    @property
    def form(self) -> ModelForm: ...

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        """Answer one request; returns when it is answered.

        Args:
            inputs: by name, all that :attr:`form` has.
            outputs: names of the outputs that are wanted; None for all.

        Raises:
            InvalidRequestError: for names, dtypes, shapes or contents that do not fit.
        """
        ...


class ModelDirectory(Protocol):
    """The models of a server. Any number of threads may ask at once."""

    @property
    def is_ready(self) -> bool:
        """True when every model that is to be there at start answers."""
        ...

    def model(self, name: str, version: str | None = None) -> ServedModel:
        """The version of a model, or where none is named the current one.

        Raises:
            UnknownModelError, ModelNotReadyError: where there is none that answers.
        """
        ...

    def versions(self, name: str) -> list[str]:
        """The versions that answer, oldest first.

        Raises:
            UnknownModelError: where there is no such model.
        """
        ...

    def index(self) -> list[IndexEntry]:
        """All models in the folder, loaded or not."""
        ...

    def load(self, name: str, version: str | None = None) -> None:
        """Load a version of a model beside the current one, by default the newest, and answer by it
        from then on; returns when it answers.

        Raises:
            UnknownModelError: where the folder has no such model or version.
            ValueError: where it cannot be loaded; the current version goes on.
        """
        ...

    def roll_back(self, name: str) -> str:
        """Answer for a model as before its last change; returns the version that answers then.

        Raises:
            UnknownModelError: where there is no such model.
            ValueError: where there is nothing to roll back to.
        """
        ...

    def unload(self, name: str) -> None:
        """Let go of all versions of a model, once they have answered what they were asked.

        Raises:
            UnknownModelError: where there is no such model.
        """
        ...
