"""Tables that TorchRec's plans put into host memory train as those on the device, bit for bit."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.torchrec_cases import log_lines

NUM_STEPS = 6
TABLES = ("a", "b", "c", "d")
CASES: dict[str, dict[str, Any]] = {
    "cached": {"placements": ["table_wise", "row_wise", "column_wise"], "load_factor": 0.95},
    "uncached": {"placements": ["row_wise"], "kernel": "fused_uvm"},
    "sequences": {"placements": ["table_wise", "row_wise"], "is_sequence": True},
    "widths": {"placements": ["table_wise"], "dims": {"a": 8, "c": 24}, "weighted": True},
    "some tables": {"placements": ["row_wise"], "in_host_memory": ("b", "c")},
    "half rows": {"placements": ["table_wise"], "half": True},
    "SGD": {"placements": ["table_wise"], "optimizer": torch.optim.SGD},
}


def make(*, load_factor: float | None, **case: Any) -> Any:
    """A run with tables on the device, or in host memory behind a cache of ``load_factor``."""
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType

    from tests.support.torchrec_training import make_run

    kernel = case.pop("kernel", "fused_uvm_caching")
    names = case.pop("in_host_memory", TABLES)
    optimizer = case.pop("optimizer", torch.optim.Adagrad)
    data_type = DataType.FP16 if case.pop("half", False) else DataType.FP32
    if load_factor is not None:
        cache = CacheParams(load_factor=load_factor, prefetch_pipeline=True)
        case |= {"kernels": dict.fromkeys(names, kernel), "cache": cache}
    placements = case.pop("placements", ["table_wise"])
    made = make_run(
        "ours", torch.device("cpu"), placements, optimizer, {"lr": 0.1}, data_type=data_type, **case
    )
    if not case.get("for_pipeline"):
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
    from torchembed.tables import TieredGroup

    groups = [group for of_one in run.model.module.sparse.tables for group in of_one.groups]
    tiered = [group for group in groups if isinstance(group, TieredGroup)]
    counters = [group.cache.counters for group in tiered]
    return {
        "tiered": len(tiered),
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


def by_hand() -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        load_factor = case.get("load_factor", 0.8)
        expected, _ = trained(**{**case, "load_factor": None})
        results, counts = trained(**{**case, "load_factor": load_factor})
        found[name] = differences(results, expected), counts
    return found


def through_pipelines() -> dict[str, Any]:
    """With steps as on a CPU, and with captured ones, that prepare batches ahead."""
    from tests.support.torchrec_pipelines import NUM_STEPS, batches, make_pipeline
    from torchembed.integrations.torchrec.pipeline import steps

    def results(load_factor: float | None, **case: Any) -> tuple[Any, Any]:
        run = make(load_factor=load_factor, for_pipeline=True, **case)
        found: list[Any] = []
        with make_pipeline("ours", run) as pipeline:
            iterator = batches(run, NUM_STEPS, is_fixed=True)
            for step in range(NUM_STEPS):
                found.append(pipeline.progress(iterator)[1].clone())
                if step in (5, 8):
                    found.append(copies_of(run))
        return [*found, copies_of(run)], counts_of(run)

    found = {}
    captured = functools.partial(steps.TrainPipeline, capture=True)
    for name, case in {
        "bags": {"placements": ["table_wise", "row_wise", "column_wise"]},
        "sequences": {"placements": ["row_wise"], "is_sequence": True},
    }.items():
        expected, _ = results(None, **case)
        for kind, capturing in {"eager": steps.TrainPipeline, "captured": captured}.items():
            with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
                patch.setattr(steps, "TrainPipeline", capturing)
                of_ours, counts = results(0.95, **case)
            found[f"{name}, {kind}"] = differences(of_ours, expected), counts, list(lines)
    return found


def loaded() -> dict[str, Any]:
    """The state where training goes on once some of another run's state is loaded, while a cache
    holds rows that were trained."""
    saved = make(load_factor=None)
    saved.steps(0, 3)
    values = copies_of(saved)

    def model_and_optimizer(run: Any) -> None:
        # Loading changes the state dict.
        run.model.load_state_dict(saved.model.state_dict())
        optimizer(run)

    def optimizer(run: Any) -> None:
        run.model.fused_optimizer.load_state_dict(saved.model.fused_optimizer.state_dict())

    def in_place(run: Any) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(state_of(run)):
                tensor.copy_(values[name])

    found = {}
    for load in (model_and_optimizer, optimizer, in_place):
        of_both = []
        for load_factor in (None, 0.8):
            run = make(load_factor=load_factor)
            run.steps(20, 22)
            load(run)
            of_both.append([copies_of(run), run.steps(3, NUM_STEPS), copies_of(run)])
        found[load.__name__] = differences(*of_both)
    return found


def refused() -> dict[str, Any]:
    """Texts of errors, and what the log says of collections that stay TorchRec's."""
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

    from torchembed.integrations.torchrec.plans.settings import unsupported_collection

    found: dict[str, Any] = {}
    run = make(load_factor=0.05)
    before = copies_of(run)
    try:
        run.steps(0, 1)
    except RuntimeError as error:
        found["too small"] = str(error), differences([copies_of(run)], [before])
    with log_lines() as lines:
        run = make(load_factor=0.5, fused_params={"cache_reserved_memory": 0.5})
        found["reserved"] = type(run.model.module.sparse).__module__, list(lines)
    for kernel in ("key_value", "ssd_virtual_table", "dram_virtual_table"):
        plan = {"a": ParameterSharding(sharding_type="table_wise", compute_kernel=kernel)}
        env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
        found[kernel] = unsupported_collection(plan, [], env, torch.device("cpu"))
    return found


def everything_on_the_cpu() -> dict[str, Any]:
    return {
        "by hand": by_hand(),
        "pipelines": through_pipelines(),
        "loaded": loaded(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["host_memory"] for answer in cpu_answers]


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_on_the_device(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        differing, counts = rank["by hand"][name]
        assert differing == []
        assert counts["tiered"] > 0
        assert counts["slots"] < counts["rows"]
        assert counts["refused"] == 0
    assert sum(rank["by hand"][name][1]["written"] for rank in ranks) > 0


@pytest.mark.parametrize("name", ["bags", "sequences"])
@pytest.mark.parametrize("kind", ["eager", "captured"])
def test_pipelines_equal_those_on_the_device(
    ranks: list[dict[str, Any]], name: str, kind: str
) -> None:
    for rank in ranks:
        differing, counts, lines = rank["pipelines"][f"{name}, {kind}"]
        assert differing == []
        assert lines == []
        assert 0 < counts["slots"] < counts["rows"]


@pytest.mark.parametrize("name", ["model_and_optimizer", "optimizer", "in_place"])
def test_training_goes_on_from_what_is_loaded(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank["loaded"][name] == []


def test_a_batch_larger_than_the_cache_is_named_and_changes_nothing(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        text, differing = rank["refused"]["too small"]
        assert differing == []
        assert re.fullmatch(
            r"tables [a-d, ]+ in host memory share a cache of \d+ rows on the device, and a batch "
            r"uses \d+ more; raise load_factor of their CacheParams, or train smaller batches",
            text,
        )


def test_what_is_not_supported_is_named(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["refused"]
    kind, lines = found["reserved"]
    assert kind == "torchrec.distributed.embeddingbag"
    (line,) = lines
    assert line.startswith("EmbeddingBagCollection (sparse) is sharded by TorchRec itself, since ")
    assert line.endswith("table a: its cache_reserved_memory is 0.5")
    for kernel in ("key_value", "ssd_virtual_table", "dram_virtual_table"):
        assert found[kernel] == f"table a has compute kernel {kernel}"


def test_settings_of_caches_are_honoured_or_named() -> None:
    pytest.importorskip("torchrec")
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.modules.embedding_configs import DataType

    from torchembed.integrations.torchrec.plans.host_memory import unsupported_cache

    taken: list[dict[str, Any]] = [
        {},
        {"cache_load_factor": 1.0, "cache_algorithm": CacheAlgorithm.LRU},
        {"cache_precision": SparseType.FP16, "cache_reserved_memory": 0.0},
        {"cache_precision": DataType.FP16, "enforce_hbm": False, "cache_sets": 0},
        {"prefetch_pipeline": True, "uvm_non_rowwise_momentum": True},
    ]
    for settings in taken:
        assert unsupported_cache(settings, DataType.FP16) is None
    refused: dict[str, Any] = {
        "cache_load_factor": 1.5,
        "cache_algorithm": CacheAlgorithm.LFU,
        "cache_sets": 4,
        "cache_reserved_memory": 0.5,
        "enforce_hbm": True,
        "gather_uvm_cache_stats": True,
    }
    for name, value in refused.items():
        assert unsupported_cache({name: value}, DataType.FP16) == f"its {name} is {value}"
    precision = {"cache_precision": DataType.FP32}
    assert unsupported_cache(precision, DataType.FP16) == (
        "its cache_precision is fp32, and that of its rows fp16"
    )


def test_a_shared_cache_has_the_slots_that_are_asked_for() -> None:
    pytest.importorskip("torchrec")
    from torchembed.integrations.torchrec.plans.host_memory import shared_cache

    for rows, factors, slots in (
        ([100], [0.25], [25]),
        ([100, 10, 1000], [0.5, 0.5, 0.1], [73, 10, 73]),  # 50 + 5 + 100, and one more
        ([7, 7], [1.0, 1.0], [7, 7]),
        ([3, 0], [0.01, 0.5], [1, 0]),
    ):
        found = shared_cache(rows, factors).cache_rows
        assert found is not None
        assert [min(found, of_table) for of_table in rows] == slots
