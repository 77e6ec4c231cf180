"""The libraries that ``bench.kernels.cpu`` compares: each looks a batch up and trains on it, as its
users would write it."""

import abc
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

import torchembed
from bench.data.workload import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD, Batch, Rule, Workload

Prepared = TypeVar("Prepared")
Vectors = TypeVar("Vectors")


class Tables(abc.ABC, Generic[Prepared, Vectors]):
    """One library's tables and optimizer, starting from the weights given.

    ``Prepared`` is the form in which it takes a batch, ``Vectors`` that in which it gives pooled
    vectors.
    """

    name: str
    rules: tuple[Rule, ...]
    """The rules that the library has."""

    @abc.abstractmethod
    def __init__(self, workload: Workload, initial: list[Tensor], rule: Rule) -> None:
        """Make the tables from the ``initial`` weights, which stay as they are."""

    @abc.abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """``batch`` in the form that the library takes; not timed."""

    @abc.abstractmethod
    def look_up(self, prepared: Prepared) -> Vectors:
        """The pooled vectors, in the library's own form."""

    @abc.abstractmethod
    def pooled(self, result: Vectors) -> Tensor:
        """Convert a result of ``look_up`` to ``[batch_size, num_features * dim]``; not timed."""

    @abc.abstractmethod
    def train(self, result: Vectors, prepared: Prepared) -> None:
        """Run backward from a result of ``look_up``, and a step of the optimizer."""

    @abc.abstractmethod
    def weights(self) -> list[Tensor]:
        """Each table's weight ``[num_rows, dim]``."""


class TorchembedTables(Tables[tuple[torchembed.SparseFeatures, Tensor], Tensor]):
    """``torchembed.EmbeddingBagCollection`` with a fused optimizer."""

    name = "torchembed"
    rules = (SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)

    def __init__(self, workload: Workload, initial: list[Tensor], rule: Rule) -> None:
        self._workload = workload
        configs = [
            torchembed.EmbeddingBagConfig(
                name=f"t{table}",
                num_embeddings=weight.shape[0],
                embedding_dim=workload.dim,
                feature_names=(f"f{table}",),
                initializer=torchembed.Constant(value=0.0),
            )
            for table, weight in enumerate(initial)
        ]
        self._collection = torchembed.EmbeddingBagCollection(configs)
        parameters = list(self._collection.parameters())
        accumulator = rule.initial_accumulator
        if rule == SGD:
            self._optimizer = torchembed.optim.SGD(parameters, lr=rule.lr)
        elif rule == ADAGRAD:
            self._optimizer = torchembed.optim.Adagrad(
                parameters, lr=rule.lr, eps=rule.eps, initial_accumulator_value=accumulator
            )
        elif rule == ROWWISE_ADAGRAD:
            self._optimizer = torchembed.optim.RowwiseAdagrad(
                parameters, lr=rule.lr, eps=rule.eps, initial_accumulator_value=accumulator
            )
        else:
            self._optimizer = torchembed.optim.Adam(
                parameters, lr=rule.lr, eps=rule.eps, betas=rule.betas
            )
        _copy(initial, self.weights())

    def prepare(self, batch: Batch) -> tuple[torchembed.SparseFeatures, Tensor]:
        features = torchembed.SparseFeatures(
            keys=tuple(f"f{feature}" for feature in range(len(batch.ids))),
            values=torch.cat(batch.ids),
            batch_size=self._workload.batch_size,
            hotness=self._workload.hotness,
        )
        return features, batch.grad

    def look_up(self, prepared: tuple[torchembed.SparseFeatures, Tensor]) -> Tensor:
        return self._collection(prepared[0]).values()

    def pooled(self, result: Tensor) -> Tensor:
        return result

    def train(self, result: Tensor, prepared: tuple[torchembed.SparseFeatures, Tensor]) -> None:
        result.backward(prepared[1])
        self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return list(self._collection.parameters())


class TorchTables(Tables[tuple[list[Tensor], list[Tensor], list[Tensor]], list[Tensor]]):
    """``nn.EmbeddingBag(sparse=True)`` for each table, with torch's optimizers."""

    name = "nn.EmbeddingBag"
    rules = (SGD, ADAGRAD, ADAM)

    def __init__(self, workload: Workload, initial: list[Tensor], rule: Rule) -> None:
        self._workload = workload
        self._bags = [
            nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum", sparse=True)
            for weight in initial
        ]
        parameters = [bag.weight for bag in self._bags]
        if rule == SGD:
            self._optimizer = torch.optim.SGD(parameters, lr=rule.lr)
        elif rule == ADAGRAD:
            self._optimizer = torch.optim.Adagrad(
                parameters,
                lr=rule.lr,
                eps=rule.eps,
                initial_accumulator_value=rule.initial_accumulator,
            )
        else:
            self._optimizer = torch.optim.SparseAdam(
                parameters, lr=rule.lr, eps=rule.eps, betas=rule.betas
            )

    def prepare(self, batch: Batch) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        offsets = [
            torch.arange(0, self._workload.batch_size * hotness, hotness)
            for hotness in self._workload.hotness
        ]
        grads = [part.contiguous() for part in batch.grad.split(self._workload.dim, dim=1)]
        return batch.ids, offsets, grads

    def look_up(self, prepared: tuple[list[Tensor], list[Tensor], list[Tensor]]) -> list[Tensor]:
        ids, offsets, _ = prepared
        return [bag(*each) for bag, *each in zip(self._bags, ids, offsets, strict=True)]

    def pooled(self, result: list[Tensor]) -> Tensor:
        return torch.cat(result, dim=1)

    def train(
        self, result: list[Tensor], prepared: tuple[list[Tensor], list[Tensor], list[Tensor]]
    ) -> None:
        torch.autograd.backward(result, prepared[2])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [bag.weight for bag in self._bags]


class FbgemmTables(Tables[tuple[Tensor, Tensor, Tensor], Tensor]):
    """FBGEMM's table-batched embedding on the CPU, whose backward updates the rows."""

    name = "FBGEMM"
    rules = (SGD, ADAGRAD, ROWWISE_ADAGRAD)

    def __init__(self, workload: Workload, initial: list[Tensor], rule: Rule) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {
            SGD: EmbOptimType.EXACT_SGD,
            ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
            ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self._workload = workload
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (num_rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for num_rows in workload.num_rows
            ],
            optimizer=kinds[rule],
            learning_rate=rule.lr,
            eps=rule.eps,
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
        )
        _copy(initial, self.weights())
        if rule != SGD:
            for (accumulator,) in self._tables.split_optimizer_states():
                accumulator.fill_(rule.initial_accumulator)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.tensor(self._workload.hotness).repeat_interleave(self._workload.batch_size)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return torch.cat(batch.ids), offsets, batch.grad

    def look_up(self, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self._tables(*prepared[:2])

    def pooled(self, result: Tensor) -> Tensor:
        return result

    def train(self, result: Tensor, prepared: tuple[Tensor, Tensor, Tensor]) -> None:
        result.backward(prepared[2])

    def weights(self) -> list[Tensor]:
        return self._tables.split_embedding_weights()


@torch.no_grad()
def _copy(initial: list[Tensor], weights: list[Tensor]) -> None:
    for source, target in zip(initial, weights, strict=True):
        target.copy_(source)
