"""``model.json``: what a version takes and gives, and how features reach tables."""

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from torchembed.checkpoints.files.checked_json import from_checked_json, to_checked_json
from torchembed.modules.dense_part.forms import (
    DEFAULT_ROWS,
    Argument,
    ArgumentKind,
    BadIds,
    Combining,
    DenseInput,
    Feature,
    Lookup,
    Output,
)
from torchembed.serving.interface import ModelForm, TensorForm
from torchembed.serving.models.errors import ModelFolderError

FORMAT_VERSION = 1
"""Of ``model.json`` and what stands beside it; readers refuse greater ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeployedTable:
    """A table of rows by id, in a folder of its own."""

    name: str
    store_name: str | None
    """Under which several models share its rows; None for rows of this model alone."""
    dim: int
    num_rows: int
    default: float
    """All elements of the vector of an id without a row."""
    num_ids: int | None
    """Ids are in ``[0, num_ids)``; None for any."""
    bad_ids: BadIds


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileForm:
    """Size and checksum of a file of the folder."""

    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """All that ``model.json`` says of a version."""

    name: str
    version: int
    inputs: tuple[DenseInput, ...]
    features: tuple[Feature, ...]
    lookups: tuple[Lookup, ...]
    tables: tuple[DeployedTable, ...]
    weights: tuple[str, ...]
    """Names of the dense part's first arguments, in ``dense.safetensors``."""
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    files: Mapping[str, FileForm]
    """By path in the folder: what the others must be."""

    @functools.cached_property
    def input_forms(self) -> Mapping[str, TensorForm]:
        """The arrays of a request, by name."""
        return {form.name: form for form in self.form().inputs}

    @functools.cached_property
    def jagged_inputs(self) -> frozenset[str]:
        """Names of the arrays of a request that have an element for each id of a jagged
        feature."""
        jagged = {feature.name for feature in self.features if feature.hotness is None}
        return frozenset(jagged | {f"{name}.weights" for name in jagged})

    @functools.cached_property
    def num_ids(self) -> Mapping[str, int]:
        """By feature, the number from which on its tables refuse ids."""
        found: dict[str, int] = {}
        for lookup in self.lookups:
            table = self.table(lookup.table)
            if table.num_ids is not None and table.bad_ids is BadIds.RAISE:
                before = found.get(lookup.feature, table.num_ids)
                found[lookup.feature] = min(before, table.num_ids)
        return found

    def form(self) -> ModelForm:
        """What requests and answers are made of."""
        inputs = [
            TensorForm(name=i.name, dtype=np.dtype(i.dtype), shape=(-1, *i.shape))
            for i in self.inputs
        ]
        for feature in self.features:
            inputs += feature_forms(feature)
        outputs = [
            TensorForm(name=o.name, dtype=np.dtype(np.float32), shape=(-1, *o.shape))
            for o in self.outputs
        ]
        outputs.append(TensorForm(name=DEFAULT_ROWS, dtype=np.dtype(np.int32), shape=(-1,)))
        return ModelForm(
            name=self.name, version=str(self.version), inputs=tuple(inputs), outputs=tuple(outputs)
        )

    def feature(self, name: str) -> Feature:
        """The feature of a name."""
        return self._features[name]

    def table(self, name: str) -> DeployedTable:
        """The table of a name."""
        return self._tables[name]

    @functools.cached_property
    def _features(self) -> Mapping[str, Feature]:
        return {feature.name: feature for feature in self.features}

    @functools.cached_property
    def _tables(self) -> Mapping[str, DeployedTable]:
        return {table.name: table for table in self.tables}

    def to_bytes(self) -> bytes:
        """The file's content: JSON, with a checksum of itself."""
        return to_checked_json({"format": FORMAT_VERSION, **_plain(dataclasses.asdict(self))})

    @classmethod
    def parse(cls, content: bytes, path: object) -> Self:
        """What the content of the file ``path`` describes.

        Raises:
            ModelFolderError: where it was changed or cut off, or is of a later format.
        """
        try:
            fields = from_checked_json(content)
        except ValueError as error:
            raise ModelFolderError(f"{path} is corrupt, deploy again: {error}") from None
        found = fields.pop("format", None) if isinstance(fields, dict) else None
        if found != FORMAT_VERSION:
            raise ModelFolderError(
                f"{path} must be of format {FORMAT_VERSION}, which this torchembed reads, got "
                f"{found!r}; deploy with this torchembed, or serve with the later one"
            )
        try:
            return cls(
                name=fields["name"],
                version=fields["version"],
                inputs=tuple(DenseInput(**_tuples(i)) for i in fields["inputs"]),
                features=tuple(Feature(**f) for f in fields["features"]),
                lookups=tuple(
                    Lookup(**{**u, "combining": Combining(u["combining"])})
                    for u in fields["lookups"]
                ),
                tables=tuple(
                    DeployedTable(**{**t, "bad_ids": BadIds(t["bad_ids"])})
                    for t in fields["tables"]
                ),
                weights=tuple(fields["weights"]),
                arguments=tuple(
                    Argument(**_tuples({**a, "kind": ArgumentKind(a["kind"])}))
                    for a in fields["arguments"]
                ),
                outputs=tuple(Output(**_tuples(o)) for o in fields["outputs"]),
                files={path: FileForm(**form) for path, form in fields["files"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(f"{path} is corrupt, deploy again: {error!r}") from None


def feature_forms(feature: Feature) -> list[TensorForm]:
    """The arrays of a feature in a request."""
    ids = np.dtype(np.int64)
    shape = (-1,) if feature.hotness is None else (-1, feature.hotness)
    forms = [TensorForm(name=feature.name, dtype=ids, shape=shape)]
    if feature.hotness is None:
        name = f"{feature.name}.lengths"
        forms.append(TensorForm(name=name, dtype=np.dtype(np.int32), shape=(-1,)))
    if feature.is_weighted:
        name = f"{feature.name}.weights"
        forms.append(TensorForm(name=name, dtype=np.dtype(np.float32), shape=shape))
    return forms


def _plain(value: Any) -> Any:
    """``value`` with the values of enums in their place."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "shape": tuple(fields["shape"])}
