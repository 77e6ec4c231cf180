"""The dense part of a step whose batches are jagged, as one CUDA graph.

Pooled vectors are ``[B, D]`` whatever the lengths of bags, so all that comes after the lookup and
before the update of rows has static shapes, its reduction over ranks too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from torchembed.core.trees import map_tensors, tensors_in
from torchembed.modules.preparing import Prepared
from torchembed.ops.weight_gradients import DeferredWeightGradients
from torchembed.training.bad_batches import Verdict
from torchembed.training.batch_layout import dense_tensors, map_parts
from torchembed.training.collection_calls import CollectionCall, handing_over
from torchembed.training.loss import ComputeLoss
from torchembed.training.step_optimizers import StepOptimizers, prepare_replay, update


class DenseGraph:
    """Forward, backward and update of all but the tables, on memory that stays where it is.

    The model runs with the batch's dense tensors and the looked-up vectors in static places. Its
    sparse features are on the meta device there, so that one that computes with ids itself, which a
    replay could not repeat, fails instead.

    Args:
        calls: all lookups of the model.
        batch: of the layout, on the device.
        vectors: of each call, a tree of tensors.
        verdict: on the batch; of all batches or of none.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        optimizers: StepOptimizers,
        calls: Sequence[CollectionCall],
        batch: Any,
        vectors: Sequence[Any],
        verdict: Verdict | None,
    ) -> None:
        self._model, self._compute_loss, self._optimizers = model, compute_loss, optimizers
        self._calls = list(calls)
        self._batch = map_parts(_to_meta, torch.empty_like, batch)
        self._vectors = [map_tensors(_leaf, of_call) for of_call in vectors]
        self._verdict = None if verdict is None else map_tensors(torch.empty_like, verdict)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients_of_others: list[tuple[Tensor, Tensor | None]] = []
        self._loss: Tensor
        self._output: Any

    def capture(self, stream: "torch.cuda.Stream") -> None:
        """Capture it on ``stream``, on which steps of the model have run before."""
        prepare_replay(self._optimizers.captured)  # what a graph does itself, at each replay
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._compute()
        self._graph = graph
        self._gradients_of_others = self._optimizers.take_gradients_of_others()

    def release(self) -> None:
        """Destroy the graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def run(
        self, batch: Any, vectors: Sequence[Any], verdict: Verdict | None
    ) -> tuple[Tensor, Any, list[Tensor | None]]:
        """A step of the dense part.

        Returns:
            The loss, the model's output, and for each tensor of ``vectors`` its gradient, which is
            overwritten by the next run.
        """
        sources, targets = self._inputs(batch, vectors, verdict)
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        if self._graph is None:
            self._compute()
        else:
            prepare_replay(self._optimizers.captured)
            with record_function("torchembed: dense part"):
                self._graph.replay()
            for parameter, grad in self._gradients_of_others:
                parameter.grad = grad
        update(self._optimizers.others, verdict)
        loss, output = map_tensors(torch.clone, (self._loss, self._output))
        return loss, output, [leaf.grad for leaf in tensors_in(self._vectors)]

    def _inputs(
        self, batch: Any, vectors: Sequence[Any], verdict: Verdict | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What is copied, and where to."""
        sources = [*dense_tensors(batch), *tensors_in(vectors)]
        targets = [*dense_tensors(self._batch), *tensors_in(self._vectors)]
        if verdict is not None:
            assert self._verdict is not None
            sources.append(verdict.skip)
            targets.append(self._verdict.skip)
        assert [s.shape for s in sources] == [t.shape for t in targets]
        return sources, targets

    def _compute(self) -> None:
        self._optimizers.zero_grad()
        for leaf in tensors_in(self._vectors):
            leaf.grad = None
        prepared = [
            Prepared(call.features_of(self._batch), None, vectors)
            for call, vectors in zip(self._calls, self._vectors, strict=True)
        ]
        with handing_over(self._calls, prepared):
            loss, output = self._compute_loss(self._model, self._batch)
        with DeferredWeightGradients():
            loss.backward()
        update(self._optimizers.captured, self._verdict)
        self._loss, self._output = loss.detach(), map_tensors(Tensor.detach, output)


def _leaf(vectors: Tensor) -> Tensor:
    """Memory for vectors, that gets a gradient where they do."""
    return torch.empty_like(vectors).requires_grad_(vectors.requires_grad)


def _to_meta(features: Any) -> Any:
    return features.to(torch.device("meta"))
