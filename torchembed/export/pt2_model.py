"""``load_pt2``: packages of AOTInductor, called by names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchembed.core.urls import is_url
from torchembed.export.graph_inputs import GraphInput
from torchembed.export.traced_model import TracedModel

SIGNATURE = "torchembed"
"""The key of a package's metadata under which its inputs, outputs and weights are."""


def signature_of(traced: TracedModel) -> dict[str, Any]:
    """Description of a package that :func:`load_pt2` reads, fit for JSON."""
    parameters = dict(traced.graph.named_parameters())
    return {
        "inputs": [
            {"name": f.name, "dtype": _name(f.dtype), "shape": f.shape, "rows": f.rows}
            for f in traced.inputs.forms
        ],
        "outputs": traced.output_names(),
        "weights": {name: [_name(p.dtype), list(p.shape)] for name, p in parameters.items()},
        "device": next(iter(parameters.values())).device.type,
    }


class Pt2Model:
    """A package of AOTInductor that :func:`~torchembed.export.export_pt2` wrote.

    Several threads may call it. None may while weights are replaced.

    Attributes:
        inputs: what a call takes, in order.
        outputs: names of what it gives.
        device: the kind of device that it runs on.
    """

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            FileNotFoundError: where there is no file.
            ValueError: where it is no package of ``export_pt2``, or behind a URL.
        """
        if is_url(path):
            raise ValueError(
                f"path must be a local file, got {path}; copy the package to this machine"
            )
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"path must be a package of export_pt2, and {path} is not there"
            )
        try:
            self._compiled = torch._inductor.aoti_load_package(str(path))
            signature = json.loads(self._compiled.get_metadata()[SIGNATURE])
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"path must be a package of export_pt2, for this machine and torch "
                f"{torch.__version__}, and {path} is none: {error}"
            ) from error
        self.inputs = tuple(
            GraphInput(
                name=form["name"],
                dtype=getattr(torch, form["dtype"]),
                shape=tuple(form["shape"]),
                rows=form["rows"],
            )
            for form in signature["inputs"]
        )
        self.outputs: tuple[str, ...] = tuple(signature["outputs"])
        self.device = torch.device(signature["device"])
        self._weights = {
            name: (getattr(torch, dtype), tuple(shape))
            for name, (dtype, shape) in signature["weights"].items()
        }
        self._replaceable = set(self._compiled.get_constant_fqns())

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The weights that may be replaced, by their names in the model's ``state_dict``."""
        return tuple(name for name in self._weights if name in self._replaceable)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, float32, by name.

        Raises:
            ValueError: for other names, dtypes, devices or shapes than :attr:`inputs`.
            RuntimeError: for ids without a row, where the model raises for them, and lengths that
                do not add up to the ids.
        """
        self._check(inputs)
        # In this order: the package goes by places.
        with torch.inference_mode():
            return self._compiled({form.name: inputs[form.name] for form in self.inputs})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace some weights; the others stay.

        Args:
            weights: by name, of the weight's dtype and shape, on any device.

        Raises:
            ValueError: for a name that the model does not have, or another dtype or shape; nothing
                is replaced then.
        """
        unknown = sorted(set(weights) - set(self._weights))
        if unknown:
            raise ValueError(f"weights must be of the model, {list(self._weights)}, got {unknown}")
        for name, weight in weights.items():
            dtype, shape = self._weights[name]
            if weight.dtype is not dtype or tuple(weight.shape) != shape:
                raise ValueError(
                    f"weight {name} must be {dtype} {list(shape)}, got {weight.dtype} "
                    f"{list(weight.shape)}"
                )
        # What the outputs do not depend on is not in the package.
        used = {
            name: weight.detach().to(self.device).contiguous()
            for name, weight in weights.items()
            if name in self._replaceable
        }
        self._compiled.load_constants(used, check_full_update=False)

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        names = [form.name for form in self.inputs]
        if set(inputs) != set(names):
            raise ValueError(f"inputs must be {names}, got {sorted(inputs)}")
        sizes: dict[str | None, tuple[str, int]] = {}
        for form in self.inputs:
            tensor = inputs[form.name]
            first = "L" if form.rows else "B"
            wanted = f"{form.dtype} [{', '.join([first, *map(str, form.shape)])}]"
            fits = tensor.dtype is form.dtype and tensor.device.type == self.device.type
            if not fits or not tensor.dim() or tuple(tensor.shape[1:]) != form.shape:
                raise ValueError(
                    f"input {form.name} must be {wanted} on {self.device}, got {tensor.dtype} "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            other, size = sizes.setdefault(form.rows, (form.name, len(tensor)))
            if len(tensor) != size:
                raise ValueError(
                    f"inputs {other} and {form.name} must have as many rows, got {size} and "
                    f"{len(tensor)}"
                )


def load_pt2(path: str | Path) -> Pt2Model:
    """The package at ``path``; see :class:`Pt2Model`."""
    return Pt2Model(path)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
