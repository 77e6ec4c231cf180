"""Tables that TorchRec's plans put into host memory train as those on the device, bit for bit."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.torchrec_cases import log_lines
from tests.support.torchrec_tiers import (
    LOADS,
    copies_of,
    differences,
    loaded,
    make,
    on_the_device,
    through_pipelines,
    trained,
)

CASES: dict[str, dict[str, Any]] = {
    "cached": {"placements": ["table_wise", "row_wise", "column_wise"], "load_factor": 0.95},
    "uncached": {"placements": ["row_wise"], "kernel": "fused_uvm"},
    "sequences": {"placements": ["table_wise", "row_wise"], "is_sequence": True},
    "widths": {"placements": ["table_wise"], "dims": {"a": 8, "c": 24}, "weighted": True},
    "some tables": {"placements": ["row_wise"], "tables_elsewhere": ("b", "c")},
    "half rows": {"placements": ["table_wise"], "half": True},
    "SGD": {"placements": ["table_wise"], "optimizer": torch.optim.SGD},
}


def by_hand() -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        expected, _ = on_the_device(trained, **case)
        results, counts = trained(**{"load_factor": 0.8, **case})
        found[name] = differences(results, expected), counts
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
    for kernel in ("ssd_virtual_table", "dram_virtual_table"):
        plan = {"a": ParameterSharding(sharding_type="table_wise", compute_kernel=kernel)}
        env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
        found[kernel] = unsupported_collection(plan, [], env, torch.device("cpu"))
    return found


def everything_on_the_cpu() -> dict[str, Any]:
    return {
        "by hand": by_hand(),
        "pipelines": through_pipelines(load_factor=0.95),
        "loaded": loaded(load_factor=0.8),
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


@pytest.mark.parametrize("name", LOADS)
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
            r"uses \d+ more; raise load_factor of their CacheParams or cache_rows of their "
            r"storage, or train smaller batches",
            text,
        )


def test_what_is_not_supported_is_named(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["refused"]
    kind, lines = found["reserved"]
    assert kind == "torchrec.distributed.embeddingbag"
    (line,) = lines
    assert line.startswith("EmbeddingBagCollection (sparse) is sharded by TorchRec itself, since ")
    assert line.endswith("table a: its cache_reserved_memory is 0.5")
    for kernel in ("ssd_virtual_table", "dram_virtual_table"):
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
