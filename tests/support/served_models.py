"""Small models in memory, and a directory of them, for tests of what serves models."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchembed.serving.interface import (
    Answer,
    IndexEntry,
    InvalidRequestError,
    ModelForm,
    ModelNotReadyError,
    ModelState,
    ServedModel,
    TensorForm,
    UnknownModelError,
)

ECHO_DTYPES = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "bytes": np.object_,
}


def check_inputs(form: ModelForm, inputs: Mapping[str, np.ndarray]) -> None:
    """Refuse inputs that are not those of ``form``."""
    unknown = set(inputs) - {tensor.name for tensor in form.inputs}
    if unknown:
        raise InvalidRequestError(f"model {form.name!r} has no inputs {sorted(unknown)}")
    for tensor in form.inputs:
        array = inputs.get(tensor.name)
        if array is None:
            raise InvalidRequestError(f"model {form.name!r} needs input {tensor.name!r}")
        if array.dtype != tensor.dtype:
            raise InvalidRequestError(
                f"input {tensor.name!r} must be {tensor.dtype}, got {array.dtype}"
            )
        if array.ndim != len(tensor.shape) or any(
            wanted not in (-1, length)
            for wanted, length in zip(tensor.shape, array.shape, strict=True)
        ):
            raise InvalidRequestError(
                f"input {tensor.name!r} must have shape {list(tensor.shape)}, got "
                f"{list(array.shape)}"
            )


def picked(
    form: ModelForm, outputs: Mapping[str, np.ndarray], wanted: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """The outputs that are wanted, all for None."""
    names = [tensor.name for tensor in form.outputs] if wanted is None else list(wanted)
    for name in names:
        if name not in outputs:
            raise InvalidRequestError(f"model {form.name!r} has no output {name!r}")
    return {name: outputs[name] for name in names}


class EchoModel:
    """Gives each of its inputs back as ``<name>.out``; any of them may be left out."""

    def __init__(self, name: str = "echo", version: str = "1") -> None:
        self.form = ModelForm(
            name=name,
            version=version,
            inputs=tuple(
                TensorForm(name=name, dtype=np.dtype(dtype), shape=(-1, 2))
                for name, dtype in ECHO_DTYPES.items()
            ),
            outputs=tuple(
                TensorForm(name=f"{name}.out", dtype=np.dtype(dtype), shape=(-1, 2))
                for name, dtype in ECHO_DTYPES.items()
            ),
        )

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        given = [tensor for tensor in self.form.inputs if tensor.name in inputs]
        form = ModelForm(
            name=self.form.name,
            version=self.form.version,
            inputs=tuple(given),
            outputs=tuple(
                tensor for tensor in self.form.outputs if tensor.name.removesuffix(".out") in inputs
            ),
        )
        check_inputs(form, inputs)
        for array in inputs.values():
            assert array.flags.writeable
            assert array.flags.aligned
        echoes = {f"{name}.out": array for name, array in inputs.items()}
        return Answer(picked(form, echoes, outputs), self.form.version, 0)


class ScoringModel:
    """Sums the rows of ids and the dense features; ids of no row count as ``default`` each.

    Two outputs: ``score`` [B, 1], and ``vector`` [B, dim], the sum of the rows.
    """

    def __init__(
        self,
        name: str = "scores",
        version: str = "1",
        *,
        num_features: int = 26,
        num_dense: int = 13,
        num_rows: int = 1000,
        dim: int = 4,
        default: float = 0.5,
    ) -> None:
        self.form = ModelForm(
            name=name,
            version=version,
            inputs=(
                TensorForm(name="dense", dtype=np.dtype(np.float32), shape=(-1, num_dense)),
                *(
                    TensorForm(name=f"id_{at}", dtype=np.dtype(np.int64), shape=(-1, 1))
                    for at in range(num_features)
                ),
            ),
            outputs=(
                TensorForm(name="score", dtype=np.dtype(np.float32), shape=(-1, 1)),
                TensorForm(name="vector", dtype=np.dtype(np.float32), shape=(-1, dim)),
            ),
        )
        rows = np.arange(num_rows * dim, dtype=np.float32).reshape(num_rows, dim) % 17
        self._rows = np.concatenate([rows, np.full((1, dim), default, np.float32)])

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        check_inputs(self.form, inputs)
        ids = np.concatenate([inputs[tensor.name] for tensor in self.form.inputs[1:]], axis=1)
        missing = (ids < 0) | (ids >= len(self._rows) - 1)
        vector = self._rows[np.where(missing, len(self._rows) - 1, ids)].sum(1)
        score = vector.sum(1, keepdims=True) + inputs["dense"].sum(1, keepdims=True)
        results = {"score": score, "vector": vector}
        return Answer(picked(self.form, results, outputs), self.form.version, int(missing.sum()))


def load_scoring(name: str, version: str) -> ScoringModel:
    """A loader as Triton's models have it."""
    return ScoringModel(name, version)


def scoring_inputs(num_samples: int, seed: int = 7) -> dict[str, np.ndarray]:
    """Inputs of a :class:`ScoringModel` that has 26 features; some ids have no row."""
    rng = np.random.default_rng(seed)
    return {
        tensor.name: (
            rng.integers(-3, 1003, (num_samples, tensor.shape[1]))
            if tensor.dtype == np.int64
            else rng.integers(0, 9, (num_samples, tensor.shape[1])).astype(np.float32)
        )
        for tensor in ScoringModel().form.inputs
    }


class HeldModel:
    """Another model, whose answers wait until they are let go."""

    def __init__(self, model: ServedModel) -> None:
        self.form = model.form
        self._model = model
        self.begun = threading.Semaphore(0)
        """Released by each answer that begins."""
        self.let_go = threading.Event()

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        self.begun.release()
        assert self.let_go.wait(60)
        return self._model.answer(inputs, outputs)


class FailingModel:
    """Its answers are an error of its own."""

    def __init__(self, name: str = "failing", version: str = "1") -> None:
        self.form = ModelForm(name=name, version=version, inputs=(), outputs=())

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        raise RuntimeError("a secret of the model")


@dataclass
class MemoryDirectory:
    """A directory whose folder is a dict: by name, versions of a model, oldest first."""

    folder: dict[str, list[ServedModel]] = field(default_factory=dict)
    loaded: dict[str, dict[str, ServedModel]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    """Why models cannot be loaded."""
    is_ready: bool = True

    def with_loaded(self, *models: ServedModel) -> "MemoryDirectory":
        """This directory, with models in its folder and loaded."""
        for model in models:
            self.folder.setdefault(model.form.name, []).append(model)
            self.loaded.setdefault(model.form.name, {})[model.form.version] = model
        return self

    def model(self, name: str, version: str | None = None) -> ServedModel:
        versions = self.loaded.get(name)
        if versions is None:
            if name in self.folder or name in self.broken:
                raise ModelNotReadyError(f"model {name!r} is not loaded")
            raise UnknownModelError(f"there is no model {name!r}")
        if version is None:
            return list(versions.values())[-1]
        if version not in versions:
            raise UnknownModelError(f"model {name!r} has no version {version!r}")
        return versions[version]

    def versions(self, name: str) -> list[str]:
        if name not in self.folder:
            raise UnknownModelError(f"there is no model {name!r}")
        return list(self.loaded.get(name, {}))

    def index(self) -> list[IndexEntry]:
        entries = []
        for name in sorted({*self.folder, *self.broken}):
            versions = self.loaded.get(name)
            if versions:
                entries += [IndexEntry(name, version, ModelState.READY, "") for version in versions]
            else:
                reason = self.broken.get(name, "unloaded")
                entries.append(IndexEntry(name, "", ModelState.UNAVAILABLE, reason))
        return entries

    def load(self, name: str, version: str | None = None) -> None:
        if name in self.broken:
            raise ValueError(self.broken[name])
        if name not in self.folder:
            raise UnknownModelError(f"there is no model {name!r}")
        found = {model.form.version: model for model in self.folder[name]}
        version = version or list(found)[-1]
        if version not in found:
            raise UnknownModelError(f"model {name!r} has no version {version!r}")
        versions = self.loaded.setdefault(name, {})
        versions.pop(version, None)
        versions[version] = found[version]

    def roll_back(self, name: str) -> str:
        versions = self.loaded.get(name, {})
        if len(versions) < 2:
            raise ValueError(f"model {name!r} has answered by nothing before")
        versions.popitem()
        return list(versions)[-1]

    def unload(self, name: str) -> None:
        if name not in self.folder:
            raise UnknownModelError(f"there is no model {name!r}")
        self.loaded.pop(name, None)
