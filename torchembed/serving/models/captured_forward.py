"""Answers of a model as CUDA graphs, from arrays of the host to arrays of the host."""

import bisect
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchembed.modules.dense_part.forms import Argument, ArgumentKind, BadIds, Combining, Lookup
from torchembed.serving.levels.cached_pooling import CachedPooling
from torchembed.serving.models.dense_program import WEIGHTS_FILE, DenseProgram, DenseWeights
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.lookup_parts import LookupPart
from torchembed.serving.models.request import Request
from torchembed.step.graph_capture import captured_graph

_CAPTURED_KINDS = {ArgumentKind.INPUT, ArgumentKind.VECTORS, ArgumentKind.UNUSED}


def vectors_argument(
    description: ModelDescription, argument: Argument, found: Tensor, num_samples: int
) -> Tensor:
    """The vectors of a lookup, as the dense part takes them."""
    found = found.to(_dtype(argument))
    lookup = description.lookups[argument.lookup]
    hotness = description.feature(lookup.feature).hotness
    # Of features that came as jagged ones the program takes the ids one after another.
    is_each = lookup.combining is Combining.EACH and not argument.shape
    if is_each and hotness is not None:
        return found.view(num_samples, hotness, -1)
    # Programs index the vectors of jagged ids: without any there is one of no id.
    return found if len(found) else found.new_zeros(1, *found.shape[1:])


def unused_argument(argument: Argument, num_samples: int, device: torch.device) -> Tensor:
    """An argument that the outputs do not depend on."""
    shape = [num_samples if n < 0 else n for n in argument.shape]
    return torch.zeros(shape, dtype=_dtype(argument), device=device)


def _dtype(argument: Argument) -> torch.dtype:
    """The dtype of vectors, or of an unused argument."""
    return getattr(torch, argument.dtype.removeprefix("torch.") or "float32")


def can_be_captured(
    description: ModelDescription, parts: Sequence[LookupPart], device: torch.device
) -> bool:
    """True for models whose answers a graph can give: of features of fixed hotness without weights
    of ids, all looked up in one cache on ``device``."""
    if len(parts) != 1 or not parts[0].leveled.is_capturable:
        return False
    cache_device = parts[0].leveled.cache.device
    return torch.empty(0, device=device).device == cache_device and _is_capturable(description)


def _is_capturable(description: ModelDescription) -> bool:
    return all(argument.kind in _CAPTURED_KINDS for argument in description.arguments) and all(
        description.feature(lookup.feature).hotness is not None
        and lookup.padding_id is None
        and not lookup.is_weighted
        for lookup in description.lookups
    )


def captured_bytes(description: ModelDescription, sizes: Sequence[int]) -> int:
    """Bytes that graphs of ``sizes`` take beside the dense part itself: their copy of its weights,
    and for each graph ids and inputs, on the host and on the device, vectors and outputs. What the
    layers compute in between is not in a model's description, and not counted.

    Args:
        description: of any model; 0 where no graph can give its answers.
        sizes: as of :class:`CapturedForwards`.
    """
    if not sizes or not _is_capturable(description):
        return 0
    hotness = [description.feature(lookup.feature).hotness or 0 for lookup in description.lookups]
    given = 8 * sum(hotness) + sum(
        math.prod(form.shape) * np.dtype(form.dtype).itemsize for form in description.inputs
    )
    computed = sum(math.prod(output.shape) * 4 for output in description.outputs)
    for argument in description.arguments:
        if argument.kind is ArgumentKind.VECTORS:
            lookup = description.lookups[argument.lookup]
            num_vectors = hotness[argument.lookup] if lookup.combining is Combining.EACH else 1
            dim = description.table(lookup.table).dim
            computed += num_vectors * dim * _dtype(argument).itemsize
    num_samples = sum(set(sizes)) + max(sizes)
    return description.files[WEIGHTS_FILE].num_bytes + num_samples * (2 * given + computed)


class _IdPlace(NamedTuple):
    """The memory of the host from which a graph copies the ids of a lookup."""

    feature: str
    greatest_id: int | None
    """The greatest id of a table that takes ids out of range for the nearest one; else None."""
    memory: np.ndarray
    """int64, for those of the most samples, of the host."""


def _greatest_id(description: ModelDescription, lookup: Lookup) -> int | None:
    table = description.table(lookup.table)
    if table.num_ids is None or table.bad_ids is not BadIds.CLAMP:
        return None
    return table.num_ids - 1


class _CapturedForward:
    """The answer to requests of at most so many samples, captured in a CUDA graph; on a CPU, which
    has none, it is computed again. One thread at a time.

    Args:
        description: of a model that :func:`can_be_captured`.
        part: its lookups.
        program: its dense part.
        weights: of that; may be written between two answers.
        num_samples: the most samples of a request.
    """

    def __init__(
        self,
        description: ModelDescription,
        part: LookupPart,
        program: DenseProgram,
        weights: Sequence[Tensor],
        num_samples: int,
    ) -> None:
        self._description, self._part = description, part
        self._program, self._weights, self._num_samples = program, weights, num_samples
        self._device = device = part.leveled.cache.device
        is_cuda = device.type == "cuda"
        lookups = [description.lookups[number] for number in part.numbers]
        hotness = {
            str(number): description.feature(lookup.feature).hotness or 0
            for number, lookup in zip(part.numbers, lookups, strict=True)
        }
        # All at once: a launch for each feature takes longer than what it does.
        dtypes = (_dtype(a) for a in description.arguments if a.kind is ArgumentKind.VECTORS)
        self._pooling = CachedPooling(
            part.leveled.cache,
            hotness,
            num_samples,
            part.features,
            dtype=next(dtypes, torch.float32),
        )
        # The number of samples comes before the ids, so that both are one copy.
        self._host_ids = torch.zeros(
            1 + self._pooling.num_ids, dtype=torch.int64, pin_memory=is_cuda
        )
        self._ids = self._host_ids.to(device)
        parts = np.split(
            self._host_ids.numpy()[1:], np.cumsum(list(hotness.values()))[:-1] * num_samples
        )
        self._places = [
            _IdPlace(lookup.feature, _greatest_id(description, lookup), part)
            for lookup, part in zip(lookups, parts, strict=True)
        ]
        self._host_inputs: dict[str, Tensor] = {}
        for form in description.inputs:
            zeros = torch.from_numpy(np.zeros((num_samples, *form.shape), dtype=form.dtype))
            self._host_inputs[form.name] = zeros.pin_memory() if is_cuda else zeros
        self._inputs = {name: host.to(device) for name, host in self._host_inputs.items()}
        self._host_missing = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
        self._host_outputs = [
            torch.empty_like(result, device="cpu", pin_memory=is_cuda) for result in self._compute()
        ]
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_cuda:
            self._graph = captured_graph(self._run, torch.cuda.Stream(device))
            self._is_done = torch.cuda.Event()
        self._num_enqueued = 0

    def enqueue(self, request: Request) -> None:
        """Compute on the current stream, after :meth:`outputs` of what was enqueued before. The
        caller is inside the cache's ``access``."""
        count, features = request.num_samples, request.features
        self._num_enqueued = count
        self._host_ids.numpy()[0] = count
        for feature, greatest, memory in self._places:
            ids = features[feature].ids
            memory[: len(ids)] = ids if greatest is None else ids.clip(0, greatest)
        for name, host in self._host_inputs.items():
            host.numpy()[:count] = request.dense[name]
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
            self._is_done.record(self._part.leveled.cache.access.stream_of(self._device))

    def outputs(self) -> list[np.ndarray] | None:
        """The outputs of what was enqueued, or None where it missed rows; waits for the device."""
        if self._graph is not None:
            self._is_done.synchronize()
        if int(self._host_missing):
            return None
        return [output.numpy()[: self._num_enqueued].copy() for output in self._host_outputs]

    def _run(self) -> None:
        for host, result in zip(self._host_outputs, self._compute(), strict=True):
            host.copy_(result, non_blocking=True)

    @torch.no_grad()
    def _compute(self) -> Sequence[Tensor]:
        self._ids.copy_(self._host_ids, non_blocking=True)
        for name, host in self._host_inputs.items():
            self._inputs[name].copy_(host, non_blocking=True)
        found = self._pooling.run(self._ids[1:], self._ids[:1])
        self._host_missing.copy_(found.num_missing, non_blocking=True)
        arguments = [self._argument(a, found.vectors) for a in self._description.arguments]
        return self._program.run(self._weights, arguments)

    def _argument(self, argument: Argument, vectors: dict[str, Tensor]) -> Tensor:
        if argument.kind is ArgumentKind.INPUT:
            return self._inputs[argument.name]
        if argument.kind is ArgumentKind.UNUSED:
            return unused_argument(argument, self._num_samples, self._device)
        found = vectors[str(argument.lookup)]
        return vectors_argument(self._description, argument, found, self._num_samples)


class CapturedForwards:
    """Answers of a version to requests whose rows are all cached, one after another: its lookups
    and its dense part are one CUDA graph for each of some numbers of samples.

    Larger requests are answered in parts: while the GPU computes one, the host copies the next.

    Args:
        description: of a model that :func:`can_be_captured`.
        part: its lookups.
        program: its dense part.
        weights: of that; graphs have a copy.
        sizes: numbers of samples, to which those of requests are rounded up. There are two graphs
            of the largest one.

    Raises:
        Exception: what CUDA raises where the program cannot be captured.
    """

    def __init__(
        self,
        description: ModelDescription,
        part: LookupPart,
        program: DenseProgram,
        weights: DenseWeights,
        sizes: Sequence[int],
    ) -> None:
        self._leveled, self._written = part.leveled, weights
        self._weights = [weight.clone() for weight in weights.tensors]
        self._names = [output.name for output in description.outputs]
        self._sizes = sorted(set(sizes))
        self._lock = threading.Lock()
        with part.leveled.cache.access.reading():
            self._forwards = [
                _CapturedForward(description, part, program, self._weights, size)
                for size in (*self._sizes, self._sizes[-1])
            ]

    def answer(self, request: Request, weights: DenseWeights) -> dict[str, np.ndarray]:
        """The outputs by name.

        Raises:
            MissedRowsError: where rows are not cached, whose use the cache has noted.
        """
        results: list[list[np.ndarray] | None] = []
        under_way = deque[_CapturedForward]()
        with self._lock:
            with self._leveled.cache.access.reading():
                if weights is not self._written:
                    for kept, weight in zip(self._weights, weights.tensors, strict=True):
                        kept.copy_(weight)
                    self._written = weights
                for forward, part in self._parts_of(request):
                    if len(under_way) == 2:
                        results.append(under_way.popleft().outputs())
                    forward.enqueue(part)
                    under_way.append(forward)
            results += [forward.outputs() for forward in under_way]
        found = [of_part for of_part in results if of_part is not None]
        if len(found) < len(results):
            raise MissedRowsError
        self._leveled.count(sum(len(f.ids) for f in request.features.values()))
        outputs = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        return dict(zip(self._names, outputs, strict=True))

    def _parts_of(self, request: Request) -> Iterator[tuple[_CapturedForward, Request]]:
        """Parts of ``request``, each with a graph; no graph has two of three that follow each
        other's start: the largest ones take turns."""
        largest, count = self._sizes[-1], request.num_samples
        for number, first in enumerate(range(0, count, largest)):
            num_samples = min(count - first, largest)
            place = bisect.bisect_left(self._sizes, num_samples)
            is_largest = place == len(self._sizes) - 1
            part = request if num_samples == count else request.part(first, first + num_samples)
            yield self._forwards[place + (is_largest and number % 2)], part


class MissedRowsError(Exception):
    """An answer needs rows that are not cached."""
