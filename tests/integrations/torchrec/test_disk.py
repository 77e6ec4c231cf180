"""Tables that TorchRec's plans put on disk train as those on the device, bit for bit."""

import copy
import functools
import importlib.util
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.torchrec_cases import log_lines, optimizer_class
from tests.support.torchrec_states import described, whole_state
from tests.support.torchrec_tiers import (
    LOADS,
    copies_of,
    differences,
    loaded,
    make,
    on_the_device,
    state_of,
    tensors_of,
    through_pipelines,
    trained,
)
from torchembed.tables import Uniform

CASES: dict[str, dict[str, Any]] = {
    "several placements": {
        "placements": ["table_wise", "row_wise", "column_wise"],
        "load_factor": 0.95,
    },
    "columns on one rank": {"placements": ["columns on one rank"]},
    "sequences": {"placements": ["table_wise", "row_wise"], "is_sequence": True},
    "widths": {"placements": ["table_wise"], "dims": {"a": 8, "c": 24}, "weighted": True},
    "some tables": {"placements": ["row_wise"], "tables_elsewhere": ("b", "c")},
    "half rows": {"placements": ["table_wise"], "half": True},
    "SGD": {"placements": ["table_wise"], "optimizer": torch.optim.SGD},
    "row-wise Adagrad": {"placements": ["column_wise"], "optimizer": "rowwise_adagrad"},
}
BEFORE, AFTER = ["table_wise", "column_wise"], ["row_wise", "table_wise"]
"""Placements of tables where a checkpoint is saved, and where it is loaded."""


def on_disk(folder: str, **params: Any) -> dict[str, Any]:
    from torchrec.distributed.types import KeyValueParams

    params = {"ssd_storage_directory": folder} | params
    return {"kernel": "key_value", "key_value": KeyValueParams(**params)}


def by_hand(folder: str) -> dict[str, Any]:
    found = {}
    for name, given in CASES.items():
        case = dict(given)
        if isinstance(case.get("optimizer"), str):
            case["optimizer"] = optimizer_class(case["optimizer"])
        expected, _ = on_the_device(trained, **case)
        case = {"load_factor": 0.8, **case}
        results, counts = trained(**case, **on_disk(folder))
        found[name] = differences(results, expected), counts
    return found


def through_checkpoints(folder: str) -> dict[str, Any]:
    """How states differ that went through a checkpoint of tables elsewhere, sharded otherwise."""
    import torch.distributed.checkpoint as dcp

    kinds = {"disk": {"load_factor": 0.8, **on_disk(folder)}, "device": {}}
    found = {}
    for saver, loader in (("disk", "device"), ("device", "disk"), ("disk", "disk")):
        saved = make(placements=BEFORE, **kinds[saver])
        saved.steps(0, 4)
        path = str(Path(folder) / f"{saver}_{loader}")
        dcp.save(state_of(saved), checkpoint_id=path)  # type: ignore[attr-defined]
        run = make(placements=AFTER, **kinds[loader])
        run.steps(9, 10)  # state that must go
        state = state_of(run)
        dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
        run.model.load_state_dict(state["model"])
        run.model.fused_optimizer.load_state_dict(state["optimizer"])
        mine, its = (whole_state(copy.deepcopy(state_of(r))) for r in (run, saved))
        found[f"{saver} to {loader}"] = [
            name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name)
        ]
    return found


def states(folder: str) -> dict[str, Any]:
    """What state dicts are, and copies of them."""
    run = make(load_factor=0.8, placements=["table_wise"], **on_disk(folder))
    run.steps(0, 2)
    state = state_of(run)
    before = copies_of(run)
    copied = dict(tensors_of(copy.deepcopy(state)))
    saved = io.BytesIO()
    torch.save(dict(tensors_of(state["model"])), saved)
    saved.seek(0)
    read = torch.load(saved)
    of_model = {f"/model{name}": tensor for name, tensor in read.items()}
    expected = {name: tensor for name, tensor in before.items() if name in of_model}
    run.steps(2, 4)
    live, after = dict(tensors_of(state)), copies_of(run)
    weights = [p for name, p in run.model.named_parameters() if "sparse" in name]
    return {
        "forms": described(state) == described(state_of(make())),
        "live": differences([{n: t.clone() for n, t in live.items()}], [after]),
        "deep copies": differences([copied], [before]),
        "pickles": differences([of_model], [expected]),
        "are trained": any(not torch.equal(before[name], after[name]) for name in before),
        "parameters": [
            (isinstance(weight, torch.nn.Parameter), type(weight).__name__)
            for weight in weights
            if weight.numel()
        ],
    }


def initial_rows(folder: str) -> dict[str, Any]:
    """The initial rows under several placements, and after :meth:`reset_parameters`."""

    def rows_of(run: Any) -> Any:
        state = run.model.state_dict()
        return whole_state({n: copy.deepcopy(t) for n, t in state.items() if "sparse" in n})

    sharded = {}
    for placement in ("table_wise", "row_wise", "column_wise"):
        run = make(
            load_factor=0.8, placements=[placement], has_initial_rows=True, **on_disk(folder)
        )
        sharded[placement] = rows_of(run)
    run.steps(0, 1)
    sharded["trained"] = rows_of(run)
    run.model.module.sparse.reset_parameters()
    sharded["reset"] = rows_of(run)
    (rows,) = (values for name, values in sharded["row_wise"].items() if ".c." in name)
    bounds = min(rows.values()), max(rows.values())
    first = sharded["table_wise"]
    return {"equal": {n: found == first for n, found in sharded.items()}, "bounds of c": bounds}


def refused(folder: str) -> dict[str, Any]:
    """Texts of errors, and what the log says."""
    from torchrec.distributed.types import ParameterSharding, ShardingEnv

    from torchembed.integrations.torchrec.plans.settings import unsupported_collection
    from torchembed.integrations.torchrec.sharded import sharders

    found: dict[str, Any] = {}
    for name, params in (("cache", {"l2_cache_size": 1}), ("host", {})):
        run = make(load_factor=0.05, **on_disk(folder, **params))
        before = copies_of(run)
        try:
            run.steps(0, 1)
        except RuntimeError as error:
            found[name] = str(error), differences([copies_of(run)], [before])
    # TorchRec's own tables on disk need a GPU.
    with pytest.MonkeyPatch.context() as patch, log_lines() as lines:
        patch.setattr(sharders, "_torchrec_shard_bags", _left_to_torchrec)
        with pytest.raises(NotImplementedError):
            make(load_factor=0.5, **on_disk(folder, gather_ssd_cache_stats=True))
    found["unsupported"] = list(lines)
    with log_lines() as lines:
        params = {"ssd_rocksdb_shards": 4, "enable_async_update": True, "max_l1_cache_size": 1}
        run = make(load_factor=0.5, **on_disk(folder, **params))
        kind = type(run.model.module.sparse).__module__
    found["without effect"] = kind, list(lines)
    for kernel in ("ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"):
        plan = {"a": ParameterSharding(sharding_type="table_wise", compute_kernel=kernel)}
        env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
        found[kernel] = unsupported_collection(plan, [], env, torch.device("cpu"))
    return found


def _left_to_torchrec(*_: Any) -> Any:
    raise NotImplementedError


def folders(folder: str) -> dict[str, Any]:
    """Where the rows of tables are, by the directory that was named."""
    found = {}
    named = f"{folder}/deep/down/rank@local_rank"
    run = make(load_factor=0.8, **on_disk(named))
    run.steps(0, 2)
    found["named"] = sorted(str(p.relative_to(folder)) for p in Path(folder).glob("deep/*/*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        run = make(load_factor=0.8, **on_disk(None))  # type: ignore[arg-type]
    run.steps(0, 2)
    (kernel,) = run.model.module.sparse.tables
    path = Path(kernel.groups[0].tables[0].spec.storage.path)
    found["temporary"] = str(path.parent) == folder, path.name, [p.name for p in path.iterdir()]
    return found


def everything_on_the_cpu() -> dict[str, Any]:
    if importlib.util.find_spec("rocksdict") is None:
        return {}
    # Threads of RocksDB may still write to folders of models that were not collected yet.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        given = [own]
        dist.broadcast_object_list(given)
        elsewhere = functools.partial(on_disk, given[0])
        found = {
            "by hand": by_hand(given[0]),
            "pipelines": through_pipelines(load_factor=0.95, **elsewhere()),
            "loaded": loaded(load_factor=0.8, **elsewhere()),
            "checkpoints": through_checkpoints(given[0]),
            "states": states(given[0]),
            "initial rows": initial_rows(given[0]),
            "refused": refused(given[0]),
            "folders": folders(given[0]),
        }
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pytest.importorskip("rocksdict")
    return [answer["disk"] for answer in cpu_answers]


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_on_the_device(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        differing, counts = rank["by hand"][name]
        assert differing == []
        assert counts["on disk"] > 0
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
        assert counts["on disk"] > 0


@pytest.mark.parametrize("name", LOADS)
def test_training_goes_on_from_what_is_loaded(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank["loaded"][name] == []


@pytest.mark.parametrize("name", ["disk to device", "device to disk", "disk to disk"])
def test_checkpoints_of_torch_hold_all_rows(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank["checkpoints"][name] == []


def test_state_dicts_are_as_those_of_tables_on_the_device(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["states"]
        assert found["forms"]
        assert found["live"] == found["deep copies"] == found["pickles"] == []
        assert found["are trained"]
        assert found["parameters"] == [(True, "RowsOnDisk")] * 2


def test_initial_rows_do_not_depend_on_the_placement(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        equal = rank["initial rows"]["equal"]
        assert equal == {
            "table_wise": True,
            "row_wise": True,
            "column_wise": True,
            "trained": False,
            "reset": True,
        }
        low, high = rank["initial rows"]["bounds of c"]
        bound = 1000**-0.5
        assert -bound <= low < -0.99 * bound
        assert 0.99 * bound < high < bound


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (
            "cache",
            (
                r"tables [a-d, ]+ on disk share a cache of \d+ rows on the device, and a batch "
                r"uses \d+ more; raise load_factor of their CacheParams and max_l1_cache_size of "
                r"their KeyValueParams, or cache_rows of their storage, or train smaller batches"
            ),
        ),
        (
            "host",
            (
                r"tables [a-d, ]+ on disk share \d+ rows of host memory, and a batch needs \d+ "
                r"more beside those in the cache on the device; raise l2_cache_size of their "
                r"KeyValueParams or host_rows of their storage, or train smaller batches"
            ),
        ),
    ],
)
def test_a_batch_that_finds_no_place_is_named_and_changes_nothing(
    ranks: list[dict[str, Any]], name: str, pattern: str
) -> None:
    for rank in ranks:
        text, differing = rank["refused"][name]
        assert differing == []
        assert re.fullmatch(pattern, text)


def test_what_is_not_supported_or_has_no_effect_is_named(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["refused"]
    (line,) = found["unsupported"]
    assert line == (
        "EmbeddingBagCollection (sparse) is sharded by TorchRec itself, since table a: its "
        "gather_ssd_cache_stats is True"
    )
    kind, (line,) = found["without effect"]
    assert kind == "torchembed.integrations.torchrec.sharded.collections"
    assert line == (
        "EmbeddingBagCollection (sparse) has tables on disk, of which these settings change "
        "nothing: ssd_rocksdb_shards (of a, b, c, d), enable_async_update (of a, b, c, d)"
    )
    assert ranks[1]["refused"]["without effect"][1] == []
    for kernel in ("ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"):
        assert found[kernel] == f"table a has compute kernel {kernel}"


def test_rows_are_in_the_directory_that_is_named_or_a_temporary_one(
    ranks: list[dict[str, Any]],
) -> None:
    for number, rank in enumerate(ranks):
        found = rank["folders"]
        assert f"deep/down/rank{number}" in found["named"]
        is_temporary, name, inside = found["temporary"]
        assert is_temporary
        assert name.startswith("torchembed_")
        assert inside == [f"rank_{number}_of_2"]


def test_the_temporary_directory_is_removed_as_the_process_ends() -> None:
    pytest.importorskip("torchrec")
    program = (
        "from torchembed.integrations.torchrec.plans import disk\n"
        "print(disk._temporary_folder().name, disk._temporary_folder().name)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    first, second = ran.stdout.splitlines()[-1].split()
    assert first == second
    assert not Path(first).exists()


def test_settings_are_honoured_or_named() -> None:
    pytest.importorskip("torchrec")
    pytest.importorskip("rocksdict")
    from torchrec.modules.embedding_configs import DataType

    from torchembed.integrations.torchrec.plans.disk import unsupported_disk

    taken: list[dict[str, Any]] = [
        {},
        {"use_passed_in_path": True, "load_ckpt_without_opt": False},
        {"max_l1_cache_size": 1, "l2_cache_size": 0, "ssd_storage_directory": "/a/rank@local_rank"},
        {"gather_ssd_cache_stats": False, "enable_raw_embedding_streaming": False},
        {"ssd_rocksdb_shards": 4, "kvzch_tbe_config": {}, "cache_load_factor": 0.5},
    ]
    for settings in taken:
        assert unsupported_disk(settings, DataType.FP32) is None
    refused: dict[str, Any] = {
        "use_passed_in_path": False,
        "gather_ssd_cache_stats": True,
        "enable_raw_embedding_streaming": True,
        "ps_hosts": (("::1", 2000),),
        "max_l1_cache_size": 0,
        "l2_cache_size": -1,
        "cache_load_factor": 1.5,
        "cache_sets": 4,
    }
    for name, value in refused.items():
        assert unsupported_disk({name: value}, DataType.FP32) == f"its {name} is {value}"
    for directory in ("/a,/b", ""):
        assert unsupported_disk({"ssd_storage_directory": directory}, DataType.FP32) == (
            f"its ssd_storage_directory is {directory!r}, and not one folder"
        )


def test_tables_stay_with_torchrec_without_rocksdict(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchrec")
    from torchrec.modules.embedding_configs import DataType

    from torchembed.integrations.torchrec.plans.disk import unsupported_disk

    monkeypatch.setitem(sys.modules, "rocksdict", None)
    reason = unsupported_disk({}, DataType.FP32)
    assert reason is not None
    assert reason.endswith("pip install 'torchembed[disk]'")


@pytest.mark.parametrize(
    ("cache_bytes", "host_bytes", "rows", "factors", "in_cache", "in_host"),
    [
        (None, 0, [1000], [0.2], 200, 400),
        (None, 50_000, [1000], [0.2], 200, 500),
        (None, 10**9, [1000], [0.2], 200, 1000),
        (10_050, 0, [1000], [0.2], 100, 200),
        (
            10_050,
            0,
            [1000, 10],
            [0.2, 1.0],
            90,
            190,
        ),
        (99, 0, [1000], [0.2], 1, 2),
    ],
)
def test_sizes_are_of_rows_with_their_state(
    cache_bytes: int | None,
    host_bytes: int,
    rows: list[int],
    factors: list[float],
    in_cache: int,
    in_host: int,
) -> None:
    pytest.importorskip("torchrec")
    from torchembed.integrations.torchrec.plans.disk import DiskSizes

    assert DiskSizes(cache_bytes, host_bytes).rows(rows, factors, 100) == (in_cache, in_host)


def test_what_a_plan_says_of_a_table_on_disk_is_noted() -> None:
    pytest.importorskip("torchrec")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.types import KeyValueParams, ParameterSharding
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from torchembed.integrations.torchrec.plans.disk import PARAMETER, without_effect
    from torchembed.integrations.torchrec.sharded.collections import ShardedEmbeddingBagCollection

    params = KeyValueParams(
        ssd_storage_directory="rows", max_l1_cache_size=3, l2_cache_size=2, ssd_rocksdb_shards=4
    )
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, num_embeddings=10, embedding_dim=8, feature_names=[name], init_fn=given
            )
            for name, given in (("a", None), ("b", torch.nn.init.zeros_))
        ],
        device=torch.device("meta"),
    )
    plan = {
        name: ParameterSharding("table_wise", "key_value", [0], key_value_params=params)
        for name in "ab"
    }
    groups = ShardedEmbeddingBagCollection.create_grouped_sharding_infos(
        collection, plan, "embedding_bags.", {}
    )
    infos = [info for group in groups.values() for info in group]
    assert without_effect(infos, collection) == {"ssd_rocksdb_shards": ["a", "b"], "init_fn": ["b"]}
    bound = 10**-0.5
    for info in infos:
        assert info.fused_params is not None
        assert info.fused_params["optimizer"] is EmbOptimType.EXACT_ROWWISE_ADAGRAD
        settings = info.fused_params[PARAMETER]
        assert settings.path == "rows"
        assert settings.sizes == (3 * 2**20, 2 * 2**30)
        assert settings.initializers == dict.fromkeys("ab", Uniform(low=-bound, high=bound))
