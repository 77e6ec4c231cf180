"""A TorchRec model as our pipeline trains it: its collections replaced by ours in each forward."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule

from torchembed.integrations.torchrec.adopted import adopted, kernels_of, output_dtypes, plans_of
from torchembed.integrations.torchrec.batches import TorchrecForm
from torchembed.integrations.torchrec.dense_parameters import DenseParameters, Leaf
from torchembed.integrations.torchrec.sharded import (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from torchembed.integrations.torchrec.tables import DenseTables, FusedTables
from torchembed.integrations.torchrec.tables_optimizer import TablesOptimizer
from torchembed.integrations.torchrec.wires import wire_of
from torchembed.sharding.ranks import Ranks
from torchembed.sharding.wire import WirePrecision
from torchembed.tables import Table

_OURS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


class Parts(NamedTuple):
    """What a model for training is made of."""

    inner: nn.Module
    """Without what ``DistributedModelParallel`` and ``DistributedDataParallel`` put around it."""
    ddp: DistributedDataParallel | None
    collections: list[tuple[str, Any]]
    """Those over our tables."""

    @property
    def dense_wire(self) -> torch.dtype | None:
        """In which its dense gradients are summed."""
        hooks = self.ddp._comm_hooks if self.ddp is not None else []
        return torch.bfloat16 if hooks else None


def parts_of(model: nn.Module) -> Parts:
    """Take ``model`` apart."""
    inner: Any = model
    ddp = None
    if isinstance(inner, DistributedModelParallel):
        inner = inner._dmp_wrapped_module
    if isinstance(inner, DistributedDataParallel):
        ddp, inner = inner, inner.module
    collections = [(name, m) for name, m in inner.named_modules() if isinstance(m, _OURS)]
    return Parts(inner, ddp, collections)


def unfit_model(parts: Parts) -> str | None:
    """Why our pipeline cannot train a model; None where it can. The same on every rank."""
    inner, ddp, collections = parts
    inside = [f"{name}." for name, _ in collections]
    for name, module in inner.named_modules():
        if isinstance(module, ShardedModule) and not isinstance(module, _OURS):
            return f"{type(module).__name__} ({name}) is sharded by TorchRec itself"
        is_wrapped = type(module).__name__ in (
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        )
        if is_wrapped and not any(name.startswith(path) for path in inside):
            return f"{name or 'the model'} is a {type(module).__name__}"
    if not collections:
        return "it has no collection that our sharders have sharded"
    if ddp is not None:
        others = [hook for hook, _ in ddp._comm_hooks if hook is not bf16_compress_hook]
        if others:
            return f"its dense gradients are reduced by {others[0].__name__}"
    wires = [wire_of(sharded.qcomm_codecs_registry) for _, sharded in collections]
    for (name, sharded), wire in zip(collections, wires, strict=True):
        if isinstance(wire, str):
            return f"{name} has {wire}"
        if wire != wires[0]:
            return f"{name} has other quantized communication than {collections[0][0]}"
        reason = _unfit_collection(sharded)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _unfit_collection(sharded: Any) -> str | None:
    pooled = isinstance(sharded, ShardedEmbeddingBagCollection)
    configs = sharded._embedding_bag_configs if pooled else sharded._embedding_configs
    if not pooled and sharded._need_indices:
        return "gives indices beside its vectors"
    if len(output_dtypes(sharded)) > 1:
        return "gives vectors of several types"
    for plan in plans_of(sharded, configs):
        by_column: dict[int, list[tuple[int, int]]] = {}
        for shard in plan.shards:
            by_column.setdefault(shard.first_column, []).append((shard.rank, shard.first_row))
        if any(places != sorted(set(places)) for places in by_column.values()):
            return f"has the rows of table {plan.table} in another order than its ranks"
    return None


class PipelineModel(nn.Module):
    """Called with a batch of :class:`BatchReader`, gives the loss and the output of the model.

    It is no part of the user's model, in which nothing is changed between forwards.

    Args:
        parts: of the user's model.
        ranks: all of them.
    """

    def __init__(self, parts: Parts, ranks: Ranks) -> None:
        super().__init__()
        self.inner = parts.inner
        self.adopted = [adopted(sharded, ranks) for _, sharded in parts.collections]
        self.collections = nn.ModuleList(self.adopted)
        self._sharded = [sharded for _, sharded in parts.collections]
        self._form = TorchrecForm()
        self.optimizers_of_tables: list[TablesOptimizer] = []
        replicated: list[Leaf] = []
        for kernel in (kernel for sharded in self._sharded for kernel in kernels_of(sharded)):
            tables = kernel._emb_module
            if isinstance(tables, FusedTables):
                self.optimizers_of_tables.append(TablesOptimizer(tables))
            else:
                replicated += _leaves(kernel, tables)
        named = _dense_parameters(parts)
        averaged: list[Tensor] = [leaf.parameter for leaf in replicated]
        if parts.ddp is not None:
            left_out = parts.ddp.parameters_to_ignore
            averaged += [p for name, p in named.items() if name not in left_out]
        self.dense = DenseParameters(
            named, replicated, averaged, ranks.gradient_group, parts.dense_wire
        )

    def forward(self, item: tuple[Any]) -> tuple[Tensor, Any]:
        batch, made = self._form.restored(item[0])
        by_name = self.dense.by_name
        with self._ours_in_place(made):
            losses, output = torch.func.functional_call(
                self.inner, by_name, (batch,), tie_weights=False
            )
        return torch.sum(losses, dim=0), output

    def restored(self, item: tuple[Any]) -> Any:
        """The batch, in the user's form."""
        return self._form.restored(item[0])[0]

    @contextlib.contextmanager
    def _ours_in_place(self, made: dict[int, tuple[Any, Any]]) -> Iterator[None]:
        """Meanwhile calls of TorchRec's collections are calls of ours, with what the features that
        they are given were ``made`` of."""
        before = [vars(sharded).get("forward") for sharded in self._sharded]
        for sharded, ours in zip(self._sharded, self.adopted, strict=True):
            sharded.forward = _Forward(ours, made)
        try:
            yield
        finally:
            for sharded, forward in zip(self._sharded, before, strict=True):
                del sharded.forward
                if forward is not None:
                    sharded.forward = forward


class _Forward(NamedTuple):
    """What is called in the place of a collection's forward."""

    ours: nn.Module
    made: dict[int, tuple[Any, Any]]

    def __call__(self, features: Any) -> Any:
        _, known = self.made.get(id(features), (None, features))
        return self.ours(known)


def _leaves(kernel: Any, tables: DenseTables) -> Sequence[Leaf]:
    held: list[Table] = [table for group in tables._layout.groups for table in group.tables]
    for table in held:
        table.parameter.requires_grad_(tables.weights.requires_grad)
    return [Leaf(kernel._param_per_table[table.spec.name], table.parameter) for table in held]


def _dense_parameters(parts: Parts) -> dict[str, nn.Parameter]:
    """Those that are in no collection, by all of their names."""
    inside = tuple(f"{name}." if name else "" for name, _ in parts.collections)
    named = parts.inner.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if not name.startswith(inside)}


def wire_precision(parts: Parts) -> WirePrecision:
    """How vectors and gradients of a model travel."""
    wire = wire_of(parts.collections[0][1].qcomm_codecs_registry)
    assert not isinstance(wire, str)
    forward, backward = wire
    return WirePrecision(forward=forward, backward=backward, dense=parts.dense_wire)
