"""Runs of TorchRec models whose tables live on the device or elsewhere, and what these give."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.torchrec_cases import log_lines

NUM_STEPS = 6
TABLES = ("a", "b", "c", "d")
LOADS = (
    "model",
    "a_table",
    "model_and_optimizer",
    "optimizer",
    "in_place",
    "model between steps",
    "optimizer between steps",
    "in_place between steps",
)
"""Names of what :func:`loaded` compares."""


def make(*, load_factor: float | None = None, **case: Any) -> Any:
    """A run with tables on the device, or elsewhere behind a cache of ``load_factor``.

    Args:
        load_factor: None for tables on the device, whatever else is said of others.
        case: of ``make_run``, or ``kernel``, the compute kernel of the tables of
            ``tables_elsewhere``, all by default; ``optimizer``; ``half`` rows; ``placements``;
            ``device``; ``has_initial_rows``, for those that the tables give themselves.
    """
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType

    from tests.support.torchrec_training import make_run

    kernel = case.pop("kernel", "fused_uvm_caching")
    has_initial_rows = case.pop("has_initial_rows", False)
    names, key_value = case.pop("tables_elsewhere", TABLES), case.pop("key_value", None)
    optimizer = case.pop("optimizer", torch.optim.Adagrad)
    data_type = DataType.FP16 if case.pop("half", False) else DataType.FP32
    if load_factor is not None:
        cache = CacheParams(load_factor=load_factor, prefetch_pipeline=True)
        kernels = dict.fromkeys(names, kernel)
        case |= {"kernels": kernels, "cache": cache, "key_value": key_value}
    placements = case.pop("placements", ["table_wise"])
    device = case.pop("device", torch.device("cpu"))
    made = make_run("ours", device, placements, optimizer, {"lr": 0.1}, data_type=data_type, **case)
    if not (has_initial_rows or case.get("for_pipeline")):
        with torch.no_grad():
            for number, (_, tensor) in enumerate(tensors_of(made.model.state_dict())):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.manual_seed(number)))
    return made


def tensors_of(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state dict that this rank holds, and their names."""
    if isinstance(state, dict):
        for key, part in sorted(state.items()):
            yield from tensors_of(part, f"{name}/{key}")
    elif hasattr(state, "local_shards"):
        for shard in state.local_shards():
            yield f"{name}/{shard.metadata.shard_offsets}", shard.tensor
    elif isinstance(state, torch.Tensor):
        yield name, state


def state_of(run: Any) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.model.fused_optimizer.state_dict()}


def copies_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(state_of(run))}


def counts_of(run: Any) -> dict[str, int]:
    """The counts of this rank's caches, and how many rows of tables there are."""
    from torchembed.core.row_caches import CacheCounter
    from torchembed.tables import DiskGroup, TieredGroup

    groups = [group for of_one in run.model.module.sparse.tables for group in of_one.groups]
    tiered = [group for group in groups if isinstance(group, TieredGroup)]
    counters = [group.cache.counters for group in tiered]
    return {
        "tiered": len(tiered),
        "on disk": sum(isinstance(group, DiskGroup) for group in tiered),
        "rows": sum(group.num_rows for group in tiered),
        "slots": sum(group.cache.row_of_slot.numel() for group in tiered),
        "written": sum(int(counter[CacheCounter.WRITTEN_ROWS]) for counter in counters),
        "refused": sum(int(counter[CacheCounter.REFUSED_BATCHES]) for counter in counters),
    }


def evaluated(run: Any) -> torch.Tensor:
    from tests.support.torchrec_training import batch

    dense, features, _ = batch(77, run.device, weighted=run.weighted, ids_dtype=run.ids_dtype)
    with torch.no_grad():
        return run.model(dense, features)


def trained(**case: Any) -> tuple[Any, Any]:
    """Everything that steps, evaluations and state dicts in turn give, and the counts."""
    run = make(**case)
    found = [evaluated(run), run.steps(0, 3), copies_of(run), evaluated(run)]
    return [*found, run.steps(3, NUM_STEPS), copies_of(run)], counts_of(run)


_FOUND: dict[str, Any] = {}


def on_the_device(function: Callable[..., Any], **case: Any) -> Any:
    """``function(**case)`` of tables on the device, whatever the case says of others: computed once
    in a process for all that compare with it."""
    for name in ("load_factor", "kernel", "tables_elsewhere"):
        case.pop(name, None)
    key = f"{function.__qualname__} of {sorted(case.items())}"
    if key not in _FOUND:
        _FOUND[key] = function(**case)
    return _FOUND[key]


def differences(one: Any, other: Any) -> list[str]:
    """The differences of two lists of results; bits are compared."""
    found = []
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            found += [f"{number}: {name}" for name in a if not torch.equal(a[name], b[name])]
        elif not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            found.append(str(number))
    return found


def through_pipelines(common: Any = None, /, **elsewhere: Any) -> dict[str, Any]:
    """How pipelines over tables ``elsewhere`` and on the device differ, with steps as on a CPU, and
    with captured ones, that prepare batches ahead.

    Args:
        common: what both have of :func:`make`'s case.
    """
    from tests.support.torchrec_pipelines import NUM_STEPS, batches, make_pipeline
    from torchembed.integrations.torchrec.pipeline import steps

    def results(**case: Any) -> tuple[Any, Any]:
        run = make(for_pipeline=True, **case)
        found: list[Any] = []
        with make_pipeline("ours", run) as pipeline:
            iterator = batches(run, NUM_STEPS, is_fixed=True)
            for step in range(NUM_STEPS):
                found.append(pipeline.progress(iterator)[1].clone())
                if step in (5, 8):
                    found.append(copies_of(run))
        return [*found, copies_of(run)], counts_of(run)

    common = common or {}
    found = {}
    captured = functools.partial(steps.TrainPipeline, capture=True)
    for name, case in {
        "bags": {"placements": ["table_wise", "row_wise", "column_wise"]},
        "sequences": {"placements": ["row_wise"], "is_sequence": True},
    }.items():
        expected, _ = on_the_device(results, **common, **case)
        for kind, capturing in {"eager": steps.TrainPipeline, "captured": captured}.items():
            with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
                patch.setattr(steps, "TrainPipeline", capturing)
                of_ours, counts = results(**common, **case, **elsewhere)
            found[f"{name}, {kind}"] = differences(of_ours, expected), counts, list(lines)
    return found


def loaded(common: Any = None, /, **elsewhere: Any) -> dict[str, Any]:
    """How training over tables ``elsewhere`` and on the device differs once some of another run's
    state is loaded, while a cache holds rows that were trained.

    Args:
        common: as of :func:`through_pipelines`.
    """
    common = common or {}
    saved = make(**common)
    saved.steps(0, 3)
    values = copies_of(saved)

    def model(run: Any) -> None:
        # Loading changes the state dict.
        run.model.load_state_dict(saved.model.state_dict())

    def a_table(run: Any) -> None:
        state = saved.model.state_dict()
        of_others = [n for n in state if "sparse" in n and not n.endswith(f".{TABLES[0]}.weight")]
        for name in of_others:
            del state[name]
        run.model.load_state_dict(state, strict=False)

    def model_and_optimizer(run: Any) -> None:
        model(run)
        optimizer(run)

    def optimizer(run: Any) -> None:
        run.model.fused_optimizer.load_state_dict(saved.model.fused_optimizer.state_dict())

    def in_place(run: Any) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(state_of(run)):
                tensor.copy_(values[name])

    def after(name: str, **case: Any) -> list[Any]:
        run = make(**case)
        run.steps(20, 22)
        loads[name](run)
        return [copies_of(run), run.steps(3, NUM_STEPS), copies_of(run)]

    def between(name: str, **case: Any) -> list[Any]:
        return between_steps(loads[name.removesuffix(" between steps")], **case)

    loads = {f.__name__: f for f in (model, a_table, model_and_optimizer, optimizer, in_place)}
    found = {}
    for name in LOADS:
        function = after if name in loads else between
        expected = on_the_device(function, name=name, **common)
        found[name] = differences(function(name, **common, **elsewhere), expected)
    return found


def between_steps(load: Callable[[Any], None], **case: Any) -> list[Any]:
    """The losses and rows of a pipeline that has prepared a batch when ``load`` changes its run."""
    from tests.support.torchrec_pipelines import NUM_STEPS, batches, make_pipeline
    from torchembed.integrations.torchrec.pipeline import steps

    run, found = make(for_pipeline=True, **case), []
    captured = functools.partial(steps.TrainPipeline, capture=True)
    with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
        patch.setattr(steps, "TrainPipeline", captured)
        with make_pipeline("ours", run) as pipeline:
            iterator = batches(run, NUM_STEPS, is_fixed=True)
            for step in range(NUM_STEPS):
                if step == NUM_STEPS // 2:
                    load(run)
                found.append(pipeline.progress(iterator)[1].clone())
    assert not lines, lines
    return [*found, copies_of(run)]
