"""A model, batches and a loss whose gradients are exact, to compare sharded with unsharded.

The loss is linear in the looked-up vectors with small integer coefficients, and every divisor is a
power of two. So the gradient of each row is an exact float32 number in whatever order it is summed,
and every optimizer must leave the same bits, sharded or not.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchembed
from tests.support.row_indices import RecordingBagConfig
from torchembed import LRU, Dynamic, HashedRows, HostMemory
from torchembed.core.random_bits import GOLDEN, signed64
from torchembed.modules.sharded.model_plan import table_specs
from torchembed.sharding import Placement, ShardingPlan, WireTransport, make_plan
from torchembed.sharding.planning.plan import place_table
from torchembed.tables import AdmissionPolicy, Eviction, Storage, Table, read_rows

NUM_STEPS = 5
SIZES = {"a": (23, 8), "b": (64, 8), "c": (50, 5), "d": (3, 8)}
FEATURES = ("f0", "f1", "f2", "f3")
USERS = {"a": ("f0", "f1"), "b": ("f2",), "c": ("f0",), "d": ("f3",)}
"""The features of each table."""
SMALLEST = {"f0": 23, "f1": 23, "f2": 64, "f3": 3}
"""Rows that every table of the feature has."""
LENGTHS = (0, 1, 2, 4)
CAPACITY = 256
"""Of dynamic tables: room for all ids that come, on each of four ranks."""
CACHE_ROWS = 48
"""Of tables in host memory: less than their rows and no less than a batch of four ranks needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the model."""

    placements: dict[str, str]
    optimizer: str = "Adagrad"
    fixed: bool = False
    pooled: bool = True
    weighted: bool = False
    fused: bool = True
    on_bad_id: str = "raise"
    dtype: torch.dtype = torch.float32
    num_nodes: int = 1
    transport: WireTransport = WireTransport.COLLECTIVE
    reserved: int = 0
    """Columns that are left free before pooled vectors."""
    is_recorded: bool = False
    """Pooled tables note what is admitted to them."""
    dynamic: tuple[str, ...] = ()
    """Tables that are dynamic."""
    capacity: int = CAPACITY
    eviction: Eviction = LRU()
    admission: AdmissionPolicy | None = None
    missing: str | HashedRows = "zeros"
    """The lookup of ids without a row; "vector": a vector."""
    stored: tuple[str, ...] = ()
    """Tables whose rows are in ``storage``."""
    planned: tuple[str, ...] = ()
    """Tables whose rows are there because the plan says so."""
    storage: Storage = HostMemory(cache_rows=CACHE_ROWS)
    column_ranks: tuple[int, ...] | None = None
    """Which ranks share the columns of column-wise tables; all where None."""

    def table_placements(self) -> dict[str, str]:
        container = "embedding_bags" if self.pooled else "embeddings"
        return {f"tables.{container}.{name}": value for name, value in self.placements.items()}

    def plan(self, num_ranks: int) -> ShardingPlan:
        specs = table_specs(make_model(self, "meta"))
        plan = make_plan(specs, num_ranks, self.table_placements(), num_nodes=self.num_nodes)
        tables = []
        for table in plan.tables:
            if self.column_ranks is not None and table.placement is Placement.COLUMN_WISE:
                spec = specs[table.table]
                table = place_table(table.table, spec, table.placement, self.column_ranks)
            if table.table[-1] in self.planned:
                table = dataclasses.replace(table, storage=self.storage)
            tables.append(table)
        return dataclasses.replace(plan, tables=tuple(tables))

    def mesh(self, device_type: str = "cpu") -> DeviceMesh:
        return made_mesh(device_type, self.num_nodes)


@functools.cache  # process groups take long to make
def made_mesh(device_type: str, num_nodes: int) -> DeviceMesh:
    num_ranks = dist.get_world_size()
    if num_nodes == 1:
        return init_device_mesh(device_type, (num_ranks,))
    return init_device_mesh(device_type, (num_nodes, num_ranks // num_nodes))


def make_model(case: Case, device: str | torch.device = "cpu") -> nn.Module:
    """Tables of two dims, one shared by two features, one feature in two tables."""
    kind = torchembed.EmbeddingBagConfig if case.pooled else torchembed.EmbeddingConfig
    if case.is_recorded:
        kind = RecordingBagConfig
    configs = []
    for name, (num_rows, dim) in SIZES.items():
        policies = Dynamic(
            eviction=case.eviction,
            admission=case.admission,
            missing=torch.arange(-2, dim - 2) / 8 if case.missing == "vector" else case.missing,
        )
        mean = case.pooled and name == "b" and not case.weighted
        is_dynamic = name in case.dynamic
        configs.append(
            kind(
                name=name,
                num_embeddings=case.capacity if is_dynamic else num_rows,
                embedding_dim=dim,
                feature_names=USERS[name],
                dtype=case.dtype,
                dynamic=policies if is_dynamic else None,
                storage=case.storage if name in case.stored else None,
                **({"pooling": torchembed.Pooling.MEAN} if mean else {}),
            )
        )
    model = nn.Module()
    if case.pooled:
        model.tables = torchembed.EmbeddingBagCollection(
            configs, is_weighted=case.weighted, device=device, on_bad_id=case.on_bad_id
        )
        model.tables.reserved_columns = case.reserved
    else:
        model.tables = torchembed.EmbeddingCollection(
            configs, device=device, on_bad_id=case.on_bad_id
        )
    return model


def make_batch(
    case: Case, rank: int, step: int, num_samples: int | None = None
) -> torchembed.SparseFeatures:
    """The batch of one rank and step; sizes differ from rank to rank, and some are empty."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if num_samples is None:
        num_samples = 4 if step == 0 else (3 + rank + step) % 4
    if case.fixed:
        lengths = torch.tensor([2, 1, 4, 1]).repeat_interleave(num_samples)
    else:
        picks = torch.randint(0, len(LENGTHS), (4 * num_samples,), generator=generator)
        lengths = torch.tensor(LENGTHS)[picks]
    limits = torch.tensor([SMALLEST[name] for name in FEATURES]).repeat_interleave(num_samples)
    limits = limits.repeat_interleave(lengths)
    values = torch.randint(0, 1 << 30, limits.shape, generator=generator) % limits
    if case.on_bad_id != "raise" and values.numel():
        values[:: max(values.numel() // 3, 1)] = -7
    takes_any = [
        all(table in case.dynamic for table, users in USERS.items() if feature in users)
        for feature in FEATURES
    ]
    is_free = torch.tensor(takes_any).repeat_interleave(num_samples).repeat_interleave(lengths)
    values = torch.where(is_free, values * signed64(GOLDEN) - 1, values)
    weights = None
    if case.weighted:
        weights = torch.randint(1, 4, values.shape, generator=generator).float()
    return torchembed.SparseFeatures(
        keys=FEATURES,
        values=values,
        batch_size=num_samples,
        hotness=(2, 1, 4, 1) if case.fixed else None,
        offsets=None if case.fixed else torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        weights=weights,
    )


def partly_unseen(batch: torchembed.SparseFeatures) -> torchembed.SparseFeatures:
    """``batch`` with ids that are in no other in place of every second one, where all tables of the
    feature take any."""
    values, positions = batch.values, torch.arange(len(batch.values))
    takes_any = (values < 0) | (values >= 1 << 20)
    unseen = torch.where(takes_any & (positions % 2 == 0), values ^ (1 << 50), values)
    return dataclasses.replace(batch, values=unseen)


def vectors_of(result: Any) -> Tensor:
    """All vectors of a collection's result, flat."""
    if isinstance(result, dict):
        return torch.cat([part.values().float().flatten() for part in result.values()])
    return result.values().float().flatten()


def exact_loss(vectors: Tensor) -> Tensor:
    """Linear with coefficients -2 to 2."""
    coefficients = torch.arange(vectors.numel(), device=vectors.device) * 7 % 5 - 2
    return (vectors * coefficients).sum()


def exact_loss_of(result: Any) -> Tensor:
    """:func:`exact_loss` of a collection's result, of each feature's vectors by themselves where it
    is a dict: zeros behind them change nothing."""
    if isinstance(result, dict):
        return torch.stack([exact_loss(vectors_of(part)) for part in result.values()]).sum()
    return exact_loss(vectors_of(result))


def make_optimizer(case: Case, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if not parameters:
        return None
    if case.fused:
        return getattr(torchembed.optim, case.optimizer)(parameters, lr=0.125)
    return getattr(torch.optim, case.optimizer)(parameters, lr=0.125)


def train_sharded(cases: list[Case], device_type: str = "cpu") -> list[dict[str, Any]]:
    """On a rank: what each case's vectors, weight gradients and rows are after training."""
    results = []
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for case in cases:
        model = make_model(case, "meta")
        plan, mesh = case.plan(num_ranks), case.mesh(device_type)
        torchembed.shard_embeddings(model, mesh, plan, transport=case.transport)
        optimizer = make_optimizer(case, model)
        outputs, weight_gradients = [], []
        for step in range(NUM_STEPS):
            batch = make_batch(case, rank, step).to(device_type)
            if batch.weights is not None:
                batch.weights.requires_grad_()
            if optimizer is not None:
                optimizer.zero_grad()
            vectors = vectors_of(model.tables(batch))
            exact_loss(vectors).backward()
            if optimizer is not None:
                optimizer.step()
            outputs.append(vectors.detach().cpu().numpy())
            if batch.weights is not None:
                weight_gradients.append(batch.weights.grad.cpu().numpy())
        if case.missing != "zeros":
            batch = partly_unseen(make_batch(case, rank, NUM_STEPS, 4)).to(device_type)
            outputs.append(vectors_of(model.eval().tables(batch)).detach().cpu().numpy())
        results.append(
            {
                "outputs": outputs,
                "weight_gradients": weight_gradients,
                "rows": held_rows(model),
                "ids": held_ids(model),
            }
        )
    return results


def held_rows(model: nn.Module) -> dict[str, tuple[Any, Any, list[Any]]]:
    """The extent, the elements and the optimizer states of each static table that this rank
    holds."""
    rows = {}
    model.tables.write_back()
    for table in model.tables._local.values():
        if table.spec.num_ids is None:
            continue
        weight, state = rows_of(table)
        rows[table.spec.name] = (extent(table), weight.numpy(), [s.numpy() for s in state])
    return rows


def held_ids(model: nn.Module) -> dict[str, tuple[slice, dict[int, Any]]]:
    """The columns of each dynamic table that this rank holds, and by id the number of its row, its
    elements and its optimizer states."""
    found = {}
    for table in model.tables.table_set.tables:
        if table.spec.num_ids is None:
            contents, (weight, states) = table.index_contents(), rows_of(table)
            tensors = [weight, *states]
            of_ids = {
                int(contents["ids"][row]): (row, *(t[row].float().cpu().numpy() for t in tensors))
                for row in contents["digests"].nonzero().flatten().tolist()
            }
            found[table.spec.name] = (extent(table)[1], of_ids)
    return found


def rows_of(table: Table) -> tuple[Tensor, list[Tensor]]:
    """All rows of ``table``, as float32, and their optimizer states; on the CPU."""
    chunk = read_rows(table, range(table.first_row, table.first_row + table.num_rows))
    return chunk.rows.detach().float().cpu(), [s.float().cpu() for s in chunk.states.values()]


def extent(table: Table) -> tuple[slice, slice]:
    """The rows and columns of its whole table that ``table`` holds."""
    first_row, first_column = table.first_row, table.first_column
    return (
        slice(first_row, first_row + table.num_rows),
        slice(first_column, first_column + table.num_columns),
    )


def train_unsharded(case: Case, num_ranks: int, device: str = "cpu") -> dict[str, Any]:
    """The same in one process: the mean of the ranks' losses."""
    model = make_model(case, device)
    optimizer = make_optimizer(case, model)
    outputs, weight_gradients = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = [make_batch(case, rank, step).to(device) for rank in range(num_ranks)]
        losses, step_outputs = [], []
        for batch in batches:
            if batch.weights is not None:
                batch.weights.requires_grad_()
            vectors = vectors_of(model.tables(batch))
            step_outputs.append(vectors.detach().cpu().numpy())
            losses.append(exact_loss(vectors))
        (torch.stack(losses).sum() / num_ranks).backward()
        optimizer.step()
        outputs.append(step_outputs)
        if case.weighted:
            # Each rank's own loss is not divided by the number of ranks.
            weight_gradients.append([b.weights.grad.cpu().numpy() * num_ranks for b in batches])
    if case.missing != "zeros":
        batches = [partly_unseen(make_batch(case, rank, NUM_STEPS, 4)) for rank in range(num_ranks)]
        found = [vectors_of(model.eval().tables(batch.to(device))) for batch in batches]
        outputs.append([vectors.detach().cpu().numpy() for vectors in found])
    return {
        "outputs": outputs,
        "weight_gradients": weight_gradients,
        "rows": whole_rows(model),
        "ids": held_ids(model),
    }


def whole_rows(model: nn.Module) -> dict[str, tuple[Any, list[Any]]]:
    """The elements and the optimizer states of each static table of an unsharded model."""
    rows = {}
    for table in model.tables._tables:
        if table.spec.num_ids is None:
            continue
        state = [table.group.table_rows(s, table).cpu().numpy() for s in table.group.states]
        rows[table.spec.name] = (table.parameter.detach().float().cpu().numpy(), state)
    return rows


def assert_equal_training(
    case: Case, sharded: list[dict[str, Any]], unsharded: dict[str, Any]
) -> None:
    """Rows and states bit for bit; vectors up to the order in which a bag is summed."""
    for rank, result in enumerate(sharded):
        for step, vectors in enumerate(result["outputs"]):
            expected = unsharded["outputs"][step][rank]
            # At most 4 ids a bag: reordering moves a sum by less than 4 eps times the sum of
            # magnitudes, bounded by 4 ids times 3 (weights) times the largest element.
            arrays = [rows for rows, _ in unsharded["rows"].values()]
            arrays += [of[1] for _, ids in unsharded["ids"].values() for of in ids.values()]
            largest = max(np.abs(rows).max() for rows in arrays) + 1.0
            tolerance = 4 * np.finfo(np.float32).eps * 4 * 3 * largest
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=tolerance, err_msg=str(case))
        for step, gradient in enumerate(result["weight_gradients"]):
            expected = unsharded["weight_gradients"][step][rank]
            tolerance = 16 * np.finfo(np.float32).eps * (np.abs(expected).max(initial=0) + 1)
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=tolerance)
    assert_equal_rows([result["rows"] for result in sharded], unsharded["rows"], str(case))
    assert_equal_ids([result["ids"] for result in sharded], unsharded["ids"], str(case))


def assert_equal_rows(
    of_ranks: list[dict[str, tuple[Any, Any, list[Any]]]],
    whole_tables: dict[str, tuple[Any, list[Any]]],
    message: str,
) -> None:
    """The ranks hold the elements and states of the whole tables, and all of them."""
    seen = {name: np.zeros(SIZES[name], bool) for name in whole_tables}
    for held in of_ranks:
        for name, (part, rows, state) in held.items():
            whole, whole_state = whole_tables[name]
            np.testing.assert_array_equal(rows, whole[part], err_msg=f"{name} of {message}")
            for local, expected in zip(state, whole_state, strict=True):
                expected = expected[part[: expected.ndim]]
                np.testing.assert_array_equal(local, expected, err_msg=f"{name} of {message}")
            seen[name][part] = True
    assert all(mask.all() for mask in seen.values()), "some elements are on no rank"


def assert_equal_ids(
    of_ranks: list[dict[str, tuple[slice, dict[int, Any]]]],
    whole_tables: dict[str, tuple[slice, dict[int, Any]]],
    message: str,
) -> None:
    """The ranks hold each column of each id's row and state once, with the bits of the whole
    tables'."""
    for name, (_, expected) in whole_tables.items():
        seen: dict[int, list[int]] = {}
        for held in of_ranks:
            columns, of_ids = held.get(name, (slice(0), {}))
            for row_id, (_, *found) in of_ids.items():
                seen.setdefault(row_id, []).extend(range(columns.start or 0, columns.stop))
                for local, whole in zip(found, expected[row_id][1:], strict=True):
                    part = whole[columns] if whole.ndim else whole
                    np.testing.assert_array_equal(local, part, err_msg=f"{name} of {message}")
        assert sorted(seen) == sorted(expected), f"ids of {name} of {message}"
        assert all(sorted(columns) == list(range(SIZES[name][1])) for columns in seen.values())
