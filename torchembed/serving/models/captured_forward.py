"""Answers of a model as CUDA graphs, from arrays of the host to arrays of the host."""

import bisect
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchembed.modules.dense_part.forms import Argument, ArgumentKind, BadIds, Combining
from torchembed.serving.levels.cached_pooling import CachedPooling
from torchembed.serving.models.dense_program import DenseProgram, DenseWeights
from torchembed.serving.models.description import ModelDescription
from torchembed.serving.models.lookup_parts import LookupPart
from torchembed.serving.models.request import Request
from torchembed.step.graph_capture import captured_graph

_CAPTURED_KINDS = {ArgumentKind.INPUT, ArgumentKind.VECTORS, ArgumentKind.UNUSED}


def vectors_argument(
    description: ModelDescription, argument: Argument, found: Tensor, num_samples: int
) -> Tensor:
    """The vectors of a lookup, as the dense part takes them."""
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
    dtype = getattr(torch, argument.dtype.removeprefix("torch."))
    return torch.zeros(shape, dtype=dtype, device=device)


def can_be_captured(
    description: ModelDescription, parts: Sequence[LookupPart], device: torch.device
) -> bool:
    """True for models whose answers a graph can give: of features of fixed hotness without weights
    of ids, all looked up in one cache on ``device``."""
    if len(parts) != 1 or not parts[0].leveled.is_capturable:
        return False
    cache_device = parts[0].leveled.cache.device
    return (
        torch.empty(0, device=device).device == cache_device
        and all(argument.kind in _CAPTURED_KINDS for argument in description.arguments)
        and all(
            description.feature(lookup.feature).hotness is not None
            and lookup.padding_id is None
            and not lookup.is_weighted
            for lookup in description.lookups
        )
    )


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
        self._pooling = CachedPooling(part.leveled.cache, hotness, num_samples, part.features)
        before = np.cumsum([0, *hotness.values()])[:-1] * num_samples
        self._places = list(zip(lookups, (1 + before).tolist(), strict=True))
        """Each lookup, and where its ids begin."""
        # The number of samples comes before the ids, so that both are one copy.
        self._host_ids = torch.zeros(
            1 + self._pooling.num_ids, dtype=torch.int64, pin_memory=is_cuda
        )
        self._ids = self._host_ids.to(device)
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

    def enqueue(self, request: Request) -> None:
        """Compute on the current stream. The caller is inside the cache's ``access``."""
        ids, count = self._host_ids.numpy(), request.num_samples
        ids[0] = count
        for lookup, first in self._places:
            of_feature = request.features[lookup.feature].ids
            table = self._description.table(lookup.table)
            if table.num_ids is not None and table.bad_ids is BadIds.CLAMP:
                of_feature = of_feature.clip(0, table.num_ids - 1)
            ids[first : first + len(of_feature)] = of_feature
        for name, host in self._host_inputs.items():
            host.numpy()[:count] = request.dense[name]
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def outputs(self, num_samples: int) -> list[np.ndarray] | None:
        """The outputs of what was enqueued, or None where it missed rows; waits for the device."""
        if self._graph is not None:
            self._part.leveled.cache.access.stream_of(self._device).synchronize()
        if int(self._host_missing):
            return None
        return [output.numpy()[:num_samples].copy() for output in self._host_outputs]

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

    Args:
        description: of a model that :func:`can_be_captured`.
        part: its lookups.
        program: its dense part.
        weights: of that; graphs have a copy.
        sizes: numbers of samples, to which those of requests are rounded up.

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
                for size in self._sizes
            ]

    def answer(self, request: Request, weights: DenseWeights) -> dict[str, np.ndarray] | None:
        """The outputs by name; None for a request that is larger than all graphs.

        Raises:
            MissedRowsError: where rows are not cached, whose use the cache has noted.
        """
        place = bisect.bisect_left(self._sizes, request.num_samples)
        if place == len(self._sizes):
            return None
        forward = self._forwards[place]
        with self._lock:
            with self._leveled.cache.access.reading():
                if weights is not self._written:
                    for kept, weight in zip(self._weights, weights.tensors, strict=True):
                        kept.copy_(weight)
                    self._written = weights
                forward.enqueue(request)
            results = forward.outputs(request.num_samples)
        if results is None:
            raise MissedRowsError
        self._leveled.count(sum(len(f.ids) for f in request.features.values()))
        return dict(zip(self._names, results, strict=True))


class MissedRowsError(Exception):
    """An answer needs rows that are not cached."""
