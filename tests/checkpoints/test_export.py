"""Whole tables out of sharded and unsharded models, and pretrained rows into them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import KEYS, NUM_ROWS, TinyModel
from torchembed.checkpoints.exports import whole_model
from torchembed.checkpoints.exports.model_shards import ModelShards
from torchembed.core import ranks
from torchembed.training import export_safetensors, import_tables, open_safetensors, whole_tables

F0, F1 = (f"tables.embedding_bags.{key}.weight" for key in KEYS)
PLACEMENTS = ("table_wise", "column_wise", "row_wise", "data_parallel")
SMALL_CHUNK_BYTES = 100
"""Six rows of a table."""


def sharded(placement: str) -> nn.Module:
    plan = {f"tables.embedding_bags.{key}": placement for key in KEYS}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torchembed.shard_embeddings(TinyModel(is_deep=True, device="meta"), mesh, plan)


def pretrained() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        F0: torch.randn(NUM_ROWS, 4, generator=generator, dtype=torch.float64),
        F1: torch.randn(NUM_ROWS + 1, 4, generator=generator).bfloat16(),
    }


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Divided(nn.Module):
    """Parameters divided by columns, and by rows within a replica."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(35.0).reshape(7, 5)
        of_one, of_two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
        self.columns = nn.Parameter(distribute_tensor(whole, of_one, [Shard(1)]))
        self.replicas = nn.Parameter(distribute_tensor(whole, of_two, [Replicate(), Shard(0)]))


def cases(folder: Path) -> dict[str, Any]:
    whole_model.CHUNK_BYTES = SMALL_CHUNK_BYTES
    results: dict[str, Any] = {"tables": {}, "errors": {}}
    sources = {F0: np.load(folder / "f0.npy", mmap_mode="r"), F1: pretrained()[F1]}
    for placement in PLACEMENTS:
        model = sharded(placement)
        results["tables"][placement] = {
            name: None if weight is None else weight.numpy() for name, weight in whole_tables(model)
        }
        export_safetensors(model, folder / placement, max_file_bytes=700)
        import_tables(model, sources)
        export_safetensors(model, folder / f"{placement} imported")
    divided = ModelShards(Divided())
    results["divided"] = [
        None if rows is None else rows.tolist()
        for name in divided.tensors
        for rows in [divided.rows_on_first_rank(name, 2, 6)]
    ]
    rank, model = ranks.rank(), sharded("row_wise")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    good = pretrained()
    bad = good if rank == 0 else {F0: good[F0], F1: torch.zeros(3, 4)}
    (folder / "file").touch()
    results["errors"] = {
        "import": error_of(lambda: import_tables(model, bad)),
        "export": error_of(lambda: export_safetensors(model, folder / "file" / "below")),
        "unchanged": all(map(torch.equal, model.parameters(), before)),
    }
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exports")
    np.save(path / "f0.npy", pretrained()[F0].numpy())
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(2, cases, folder)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sharded_tables_are_whole_on_the_first_rank(
    placement: str, results: list[dict[str, Any]]
) -> None:
    model = TinyModel(is_deep=True)
    first, second = (of_rank["tables"][placement] for of_rank in results)
    assert set(first) == {F0, F1}
    assert second == dict.fromkeys(first)
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, model.get_parameter(name).detach().numpy())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sharded_models_are_exported_whole(
    placement: str, results: list[dict[str, Any]], folder: Path
) -> None:
    expected = TinyModel(is_deep=True).state_dict()
    files = sorted(path.name for path in (folder / placement).iterdir())
    assert files == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((folder / placement / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for name, tensor in open_safetensors(folder / placement).items():
        assert torch.equal(tensor, expected[name]), name
        alone = open_safetensors(folder / placement / index["weight_map"][name])
        assert torch.equal(alone[name], expected[name]), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_rank_imports_its_rows(
    placement: str, results: list[dict[str, Any]], folder: Path
) -> None:
    exported = open_safetensors(folder / f"{placement} imported")
    for name, source in pretrained().items():
        assert torch.equal(exported[name], source.float()), name
    for name, value in TinyModel(is_deep=True).state_dict().items():
        assert name in pretrained() or torch.equal(exported[name], value), name


def test_columns_and_replicas_are_put_together(results: list[dict[str, Any]]) -> None:
    rows = torch.arange(35.0).reshape(7, 5)[2:6].tolist()
    assert results[0]["divided"] == [rows, rows]
    assert results[1]["divided"] == [None, None]


def test_what_fails_on_one_rank_fails_on_all(results: list[dict[str, Any]]) -> None:
    first, second = (of_rank["errors"] for of_rank in results)
    assert second["import"] == (
        f"ValueError: source of {F1} must have shape [24, 4] as the table has, got [3, 4]"
    )
    assert first["import"] == f"RuntimeError: rank 1 could not import tables: {second['import']}"
    assert first["export"].startswith("NotADirectoryError: ")
    assert second["export"].startswith("RuntimeError: rank 0 could not export the model to ")
    assert first["unchanged"] is second["unchanged"] is True


def test_tables_become_those_of_torch() -> None:
    model = TinyModel()
    bags = {
        name: nn.EmbeddingBag.from_pretrained(weight, mode="sum")
        for name, weight in whole_tables(model)
        if weight is not None
    }
    ids, offsets = torch.tensor([3, 5, 5]), torch.tensor([0, 2])
    for name, bag in bags.items():
        weight = model.get_parameter(name)
        assert torch.equal(bag(ids, offsets), torch.stack([weight[3] + weight[5], weight[5]]))
        bag.weight.data.zero_()
        assert weight.any(), "a copy"
    assert set(bags) == {F0, F1}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool],
)
def test_files_hold_any_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Module()
    for name, shape in (("odd", (3, 5)), ("number", ()), ("nothing", (0, 4)), ("deep", (2, 3, 2))):
        model.register_buffer(name, torch.randint(0, 2, shape).to(dtype))
    model.register_buffer("byte", torch.ones(1, dtype=torch.uint8))
    export_safetensors(model, tmp_path / "out")
    tensors = open_safetensors(tmp_path / "out" / "model.safetensors")
    for name, value in model.state_dict().items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value), name
    tensors["odd"].zero_()
    again = open_safetensors(tmp_path / "out")
    assert torch.equal(again["odd"], model.get_buffer("odd")), "memory alone is written to"


def test_the_package_of_the_format_reads_the_files(tmp_path: Path) -> None:
    package = pytest.importorskip(
        "safetensors.torch", reason="needs the package safetensors: pip install safetensors"
    )
    model = TinyModel(is_deep=True)
    export_safetensors(model, tmp_path / "out")
    loaded = package.load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    package.save_file(loaded, tmp_path / "theirs.safetensors")
    for name, value in open_safetensors(tmp_path / "theirs.safetensors").items():
        assert torch.equal(loaded[name], value), name


def test_imports_that_do_not_fit_are_named() -> None:
    model = TinyModel()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    good = pretrained()[F0]
    for sources, message in (
        ({F0: good, "f9": good}, r"named as the tables are, \['tables\..*'\]; got f9"),
        ({F0: good, "dense.weight": torch.zeros(1, 2)}, r"as the tables are, .* got dense\.weight"),
        (
            {F0: good[:, :3]},
            r"f0\.weight must have shape \[23, 4\] as the table has, got \[23, 3\]",
        ),
        ({F0: good.numpy()[0]}, r"must have shape \[23, 4\] .*, got \[4\]"),
        ({F0: good.long()}, r"f0\.weight must have a floating dtype, got torch\.int64"),
        ({F0: good.long().numpy()}, r"must have a floating dtype, got int64"),
    ):
        with pytest.raises(ValueError, match=message):
            import_tables(model, sources)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("as_array", [False, True])
def test_imported_rows_that_are_not_finite_are_named(bad: float, as_array: bool) -> None:
    model = TinyModel()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    source = pretrained()[F0].double()
    source[17, 2] = bad
    # As float32, 1e300 is infinite.
    message = (
        r"f0\.weight must hold finite numbers in torch\.float32, "
        rf"got {float(torch.tensor(bad))} in row 17 \(from 0\); repair or remove such rows"
    )
    with pytest.raises(ValueError, match=message):
        import_tables(model, {F0: source.numpy() if as_array else source})
    assert all(map(torch.equal, model.parameters(), before))


def test_exports_that_cannot_be_are_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"wave must have a dtype that .* know, got torch\.complex"
    ):
        export_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match=r"path must not be there yet, and .* is; remove it"):
        export_safetensors(TinyModel(), tmp_path)
    with pytest.raises(ValueError, match="max_file_bytes must be positive, got 0"):
        export_safetensors(TinyModel(), tmp_path / "out", max_file_bytes=0)


def test_files_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors\.index\.json"):
        open_safetensors(tmp_path)
    export_safetensors(TinyModel(), tmp_path / "out")
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    file = tmp_path / "damaged.safetensors"
    unknown = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    lying = [  # of a range that the shape does not fill, or that begins before the data
        json.dumps({"x": {"dtype": "F32", "shape": [size], "data_offsets": [start, 8]}}).encode()
        for size, start in ((1, 0), (3, 0), (3, -4))
    ]
    for content, message in (
        (whole[:-1], rf"must have {len(whole)} bytes as its header says, got {len(whole) - 1}"),
        (whole[:20], "must be a safetensors file of dtypes"),
        (b"", "must be a safetensors file of dtypes"),
        (struct.pack("<Q", 2) + b"[]", "must be a safetensors file of dtypes"),
        (struct.pack("<Q", len(unknown)) + unknown + b"x", "of dtypes .*'F64'"),
        *((struct.pack("<Q", len(bad)) + bad + bytes(8), "its header is not") for bad in lying),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_safetensors(file)
