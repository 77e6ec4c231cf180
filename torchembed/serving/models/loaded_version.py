"""A version of a model that is loaded and answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchembed.modules.dense_part.forms import (
    DEFAULT_ROWS,
    Argument,
    ArgumentKind,
    Combining,
)
from torchembed.serving.interface import Answer, InvalidRequestError, ModelForm
from torchembed.serving.levels import LeveledLookup
from torchembed.serving.models.captured_forward import (
    CapturedForwards,
    MissedRowsError,
    can_be_captured,
    unused_argument,
    vectors_argument,
)
from torchembed.serving.models.dense_program import (
    PROGRAM_FILE,
    WEIGHTS_FILE,
    DenseProgram,
    DenseWeights,
    load_program,
    read_weights,
)
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.lookup_parts import lookup_parts
from torchembed.serving.models.request import Request, as_tensor, check_request, lookup_features

_WARM_SAMPLES = (1, 2)
"""Numbers of samples of the requests that are answered before any other."""


class LoadedVersion:
    """A version of a model that answers; any number of threads may ask at once.

    Args:
        folder: of the version, whose files were checked.
        description: of it.
        lookups: by the name of each of its tables in the description.
        store_names: the name of each table in its lookup, likewise.
        device: of the dense part.
        captured_sizes: as :class:`ModelOptions` has it.

    Raises:
        ModelFolderError: where the dense part cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        description: ModelDescription,
        lookups: Mapping[str, LeveledLookup],
        store_names: Mapping[str, str],
        device: torch.device,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        self.description, self._device = description, device
        self.form: ModelForm = description.form()
        self._program = DenseProgram(load_program(folder / PROGRAM_FILE), device)
        tensors = read_weights(folder / WEIGHTS_FILE, description.weights, device)
        self.weights = DenseWeights(tuple(tensors), str(description.version))
        """Those that the next request is answered by; assigned as a whole, so that no answer mixes
        two."""
        self._parts = list(lookup_parts(description, lookups, store_names))
        self._captured: CapturedForwards | None = None
        if captured_sizes and can_be_captured(description, self._parts, device):
            self._captured = CapturedForwards(
                description, self._parts[0], self._program, self.weights, captured_sizes
            )

    def with_weights(self, tensors: Mapping[str, Tensor], version: int) -> DenseWeights:
        """Weights on the device for :attr:`weights`, copied from ``tensors``, and rounded where the
        version was deployed in a narrower floating-point dtype.

        Args:
            tensors: all weights by name.
            version: that answers by them have.

        Raises:
            ValueError: for other names, shapes or dtypes than the version's own.
        """
        names = self.description.weights
        if set(tensors) != set(names):
            raise ValueError(f"tensors must be {sorted(names)}, got {sorted(tensors)}")
        for name, weight in zip(names, self.weights.tensors, strict=True):
            given = tensors[name]
            if given.shape != weight.shape or not _can_be_rounded(given.dtype, weight.dtype):
                raise ValueError(
                    f"tensor {name} must be {weight.dtype} {list(weight.shape)}, got "
                    f"{given.dtype} {list(given.shape)}"
                )
        copies = [
            tensors[name].detach().to(self._device, weight.dtype, copy=True)
            for name, weight in zip(names, self.weights.tensors, strict=True)
        ]
        return DenseWeights(tuple(copies), str(version))

    def answer(
        self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
    ) -> Answer:
        """As :meth:`torchembed.serving.interface.ServedModel.answer`."""
        self.check_outputs(outputs)
        return self.answer_request(check_request(self.description, inputs), outputs)

    def check_outputs(self, outputs: Sequence[str] | None) -> None:
        """Raise ``InvalidRequestError`` for names that are no outputs."""
        names = [form.name for form in self.form.outputs]
        unknown = sorted(set(outputs or ()) - set(names))
        if unknown:
            raise InvalidRequestError(f"outputs must be among {names}, got {unknown}")

    def answer_request(self, request: Request, outputs: Sequence[str] | None = None) -> Answer:
        """The answer to a request that was checked."""
        weights, is_use = self.weights, True
        if self._captured is not None:
            try:
                arrays = self._captured.answer(request, weights)
            except MissedRowsError:
                is_use = False
            else:
                num_default = np.zeros(request.num_samples, dtype=np.int32)
                return _answer(arrays, num_default, weights, outputs)
        vectors: dict[int, Tensor] = {}
        num_default = np.zeros(request.num_samples, dtype=np.int32)
        for part in self._parts:
            features = lookup_features(self.description, request, part.numbers)
            found = part.leveled.pooled(features, part.features, is_use=is_use)
            vectors |= {n: found.vectors[str(n)].to(self._device) for n in part.numbers}
            num_default += found.num_default_rows.cpu().numpy()
        arguments = [self._argument(a, request, vectors) for a in self.description.arguments]
        results = self._program.run(weights.tensors, arguments)
        names = [output.name for output in self.description.outputs]
        arrays = {n: r.cpu().numpy() for n, r in zip(names, results, strict=True)}
        return _answer(arrays, num_default, weights, outputs)

    def warm(self) -> None:
        """Answer made-up requests, so that the first real one finds all compiled and in memory."""
        for num_samples in _WARM_SAMPLES:
            self.answer(self._made_up(num_samples))

    def try_dense_part(self) -> None:
        """Run the dense part for made-up requests, without a lookup, so that one that cannot run
        fails before rows are loaded."""
        for num_samples in _WARM_SAMPLES:
            request = check_request(self.description, self._made_up(num_samples))
            vectors: dict[int, Tensor] = {}
            for number, lookup in enumerate(self.description.lookups):
                is_each = lookup.combining is Combining.EACH
                count = len(request.features[lookup.feature].ids) if is_each else num_samples
                dim = self.description.table(lookup.table).dim
                vectors[number] = torch.zeros(count, dim, device=self._device)
            arguments = [self._argument(a, request, vectors) for a in self.description.arguments]
            self._program.run(self.weights.tensors, arguments)

    def _made_up(self, num_samples: int) -> dict[str, np.ndarray]:
        """A request of zeros, without ids of jagged features."""
        inputs, jagged = {}, self.description.jagged_inputs
        for form in self.form.inputs:
            size = 0 if form.name in jagged else num_samples
            inputs[form.name] = np.zeros((size, *form.shape[1:]), dtype=form.dtype)
        return inputs

    def _argument(
        self, argument: Argument, request: Request, vectors: Mapping[int, Tensor]
    ) -> Tensor:
        match argument.kind:
            case ArgumentKind.INPUT:
                return as_tensor(request.dense[argument.name]).to(self._device)
            case ArgumentKind.IDS:
                ids = as_tensor(request.features[argument.name].ids).to(self._device)
                if self.description.feature(argument.name).hotness is not None:
                    return ids.view(request.num_samples, *argument.shape)
                # As many as there are vectors.
                return ids if len(ids) else ids.new_zeros(1)
            case ArgumentKind.LENGTHS:
                return as_tensor(request.features[argument.name].lengths).to(self._device)
            case ArgumentKind.UNUSED:
                return unused_argument(argument, request.num_samples, self._device)
            case ArgumentKind.VECTORS:
                found = vectors[argument.lookup]
                return vectors_argument(self.description, argument, found, request.num_samples)


def _can_be_rounded(given: torch.dtype, dtype: torch.dtype) -> bool:
    """True for ``dtype`` itself, and for float32 where that is of 16 bits."""
    is_narrower = dtype in (torch.float16, torch.bfloat16) and given == torch.float32
    return given == dtype or is_narrower


def _answer(
    arrays: dict[str, np.ndarray],
    num_default: np.ndarray,
    weights: DenseWeights,
    outputs: Sequence[str] | None,
) -> Answer:
    """The answer of the ``outputs`` that are wanted."""
    arrays[DEFAULT_ROWS] = num_default
    wanted = arrays if outputs is None else {name: arrays[name] for name in outputs}
    return Answer(wanted, weights.version, int(num_default.sum()))
