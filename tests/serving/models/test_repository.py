"""Versions that are loaded, switched, rolled back and let go of while they answer."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.served_lookups import options_over
from tests.support.waiting import wait_until
from torchembed.modules.served_names import dense_tensors
from torchembed.serving.interface import (
    ModelNotReadyError,
    ModelState,
    UnknownModelError,
)
from torchembed.serving.models import (
    ModelFolderError,
    ModelRepository,
    deploy,
    models_in,
    versions_in,
)
from torchembed.stores import MemoryStore, RocksDBStore, volatile_memory_bytes

NUM_ROWS, DIM = 40, 3


class Stamped(nn.Module):
    """Rows and weights that all are the number of their version: an answer that mixes two shows."""

    def __init__(self, version: float) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.deep = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.items.weight.fill_(version)
            self.deep.weight.fill_(version)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        rows = self.items(ids)
        return {"rows": rows, "dense": self.deep(torch.ones_like(rows[:, :1]))[:, 0]}


IDS = {"ids": torch.arange(8).view(8, 1).numpy()}


def deploy_stamped(folder: Path, version: int, name: str = "m", **options: Any) -> None:
    examples = torch.zeros(2, 1, dtype=torch.int64)
    deploy(Stamped(version), folder, name=name, version=version, examples=examples, **options)


def stamps(repository: ModelRepository, name: str = "m", version: str | None = None) -> Any:
    """The version, the rows' and the weights' stamp of an answer."""
    answer = repository.model(name, version).answer(IDS)
    rows, dense = np.unique(answer.outputs["rows"]), np.unique(answer.outputs["dense"])
    return answer.version, rows.tolist(), dense.tolist()


def weights(stamp: float) -> dict[str, Tensor]:
    return dense_tensors(Stamped(stamp))


def apply_stamp(repository: ModelRepository, stamp: int, version: int) -> None:
    keys = torch.arange(NUM_ROWS)
    rows = torch.full((NUM_ROWS, DIM), float(stamp))
    repository.apply_rows("m", "items", keys, rows, version=version)


@pytest.mark.parametrize("by_version", [False, True])
def test_the_newest_version_answers_and_the_one_before_comes_back(
    tmp_path: Path, by_version: bool
) -> None:
    deploy_stamped(tmp_path, 1)
    with (
        MemoryStore() as store,
        ModelRepository(tmp_path, options_over(store, rows_by_version=by_version)) as repository,
    ):
        assert not repository.is_ready
        repository.start()
        assert repository.is_ready
        assert stamps(repository) == ("1", [1.0], [1.0])
        deploy_stamped(tmp_path, 2)
        assert stamps(repository) == ("1", [1.0], [1.0])
        repository.load("m")
        assert stamps(repository) == ("2", [2.0], [2.0])
        # Shared rows are those of the newest version, whichever version answers.
        assert repository.roll_back("m") == "1"
        assert stamps(repository) == ("1", [1.0 if by_version else 2.0], [1.0])
        with pytest.raises(ValueError, match="must have answered by something before"):
            repository.roll_back("m")
        repository.load("m")
        assert stamps(repository) == ("2", [2.0], [2.0])


def test_a_version_is_loaded_by_name(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        deploy_stamped(tmp_path, version)
    with MemoryStore() as store:
        with ModelRepository(tmp_path, options_over(store, rows_by_version=True)) as repository:
            repository.load("m", "2")
            assert stamps(repository) == ("2", [2.0], [2.0])
            repository.load("m", "1")
            assert stamps(repository) == ("1", [1.0], [1.0])
            assert repository.versions("m") == ["1", "2"]
            assert repository.roll_back("m") == "2"
            for version in ("4", "0", "x"):
                with pytest.raises(UnknownModelError, match=f"version of model m must.*{version}"):
                    repository.load("m", version)
            assert stamps(repository) == ("2", [2.0], [2.0])
            repository.load("m")
            assert stamps(repository) == ("3", [3.0], [3.0])
        named = options_over(store, rows_by_version=True, versions=(1, 3))
        with ModelRepository(tmp_path, named) as repository:
            with pytest.raises(UnknownModelError, match=r"to be served, \[1, 3\], got 2"):
                repository.load("m", "2")
            repository.load("m", "1")
            assert repository.versions("m") == ["1"]


def test_rows_of_versions_are_let_go_of_with_them(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        deploy_stamped(tmp_path, version)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            assert repository.versions("m") == ["3"]
            deploy_stamped(tmp_path, 4)
            repository.load("m")
            assert repository.versions("m") == ["3", "4"]
            deploy_stamped(tmp_path, 5)
            repository.load("m")
            assert repository.versions("m") == ["4", "5"]
            num_rows = {n: store.table(n, 4 * DIM).num_rows() for n in store.tables()}
            assert num_rows == {"m/items@4": NUM_ROWS, "m/items@5": NUM_ROWS}


def test_named_versions_and_several_of_the_newest_answer(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        deploy_stamped(tmp_path, version)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, versions=(1, 3))
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            assert repository.versions("m") == ["1", "3"]
            assert stamps(repository, version="1") == ("1", [1.0], [1.0])
            assert stamps(repository) == ("3", [3.0], [3.0])
            with pytest.raises(UnknownModelError, match=r"one of \[1, 3\], got 2"):
                repository.model("m", "2")
            for version in ("x", "1" * 5000):
                message = f"must be a number, got '{version[:40]}'"
                with pytest.raises(UnknownModelError, match=message):
                    repository.model("m", version)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, num_latest_versions=2)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            assert repository.versions("m") == ["2", "3"]


def test_the_index_says_what_is_loaded_and_why_something_is_not(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1, "a")
    deploy_stamped(tmp_path, 1, "b")
    with MemoryStore() as store:
        options = options_over(store)
        with ModelRepository(tmp_path, options, models={"a": options}) as repository:
            repository.start()
            assert [(e.name, e.version, e.state) for e in repository.index()] == [
                ("a", "1", ModelState.READY),
                ("b", "", ModelState.UNAVAILABLE),
            ]
            with pytest.raises(UnknownModelError, match="is to be served, got 'b'"):
                repository.load("b")
            with pytest.raises(UnknownModelError, match=r"one of \['a'\].*got 'b'"):
                repository.model("b")
            deploy_stamped(tmp_path, 2, "a")
            (tmp_path / "a" / "2" / "dense.pt2").write_bytes(b"")
            with pytest.raises(ValueError, match=r"model a cannot be loaded: .*is corrupt"):
                repository.load("a")
            assert stamps(repository, "a") == ("1", [1.0], [1.0])
            first, second, _ = repository.index()
            assert (first.version, first.state) == ("1", ModelState.READY)
            assert second.state is ModelState.UNAVAILABLE and "is corrupt" in second.reason
            repository.unload("a")
            with pytest.raises(ModelNotReadyError, match="model a is not loaded: unloaded"):
                repository.model("a")
            with pytest.raises(UnknownModelError, match="model a is not loaded"):
                repository.swap_dense("a", {}, 3)
            shutil.rmtree(tmp_path / "a" / "2")
            repository.load("a")
            assert stamps(repository, "a") == ("1", [1.0], [1.0])


def test_other_folders_are_no_models(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1)
    for name in ("lost+found", ".snapshot", "-old", "a b", "x" * 121):
        shutil.copytree(tmp_path / "m", tmp_path / name)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "m" / "2").symlink_to(tmp_path / "nowhere")
    assert models_in(tmp_path) == ["m"] and versions_in(tmp_path, "m") == [1]


@pytest.mark.parametrize("damage", ["model.json", "dense.safetensors", "tables", "moved"])
def test_damaged_folders_are_named_and_leave_nothing(tmp_path: Path, damage: str) -> None:
    deploy_stamped(tmp_path, 1)
    folder = tmp_path / "m" / "1"
    if damage == "moved":
        folder.rename(tmp_path / "m" / "2")
    elif damage == "tables":
        path = next((folder / "tables" / "items").glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path = folder / damage
        path.write_bytes(path.read_bytes()[:-1])
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        with pytest.raises(ValueError, match=r"model m cannot be loaded: ") as raised:
            repository.start()
        assert isinstance(raised.value.__cause__, ModelFolderError)
        assert not repository.is_ready and repository.lookups() == {}


def test_memory_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1)
    files = [tmp_path / "m" / "1" / name for name in ("dense.pt2", "dense.safetensors")]
    rows, dense = (
        volatile_memory_bytes(NUM_ROWS, 4 * DIM),
        sum(path.stat().st_size for path in files),
    )
    with MemoryStore() as store:
        options = options_over(store)
        short = ModelRepository(tmp_path, options, max_bytes=rows + dense - 1)
        message = (
            rf"version 1 of model m needs {rows + dense:,} bytes of memory \(dense part {dense:,}; "
            rf"its largest tables: m/items {rows:,}\), and {rows + dense - 1:,} of "
        )
        with short, pytest.raises(ValueError, match=message):
            short.start()
        assert store.tables() == {}
        with ModelRepository(tmp_path, options, max_bytes=rows + 2 * dense) as enough:
            enough.start()
            # A second version shares the rows, and needs no more than its dense part.
            deploy_stamped(tmp_path, 2)
            enough.load("m")
            deploy_stamped(tmp_path, 3)
            with pytest.raises(ValueError, match=rf"needs {dense:,} bytes .* and 0 of"):
                enough.load("m")
            # Rows that are shared stay when nothing answers by them, and count.
            enough.unload("m")
            deploy_stamped(tmp_path, 1, "other")
            with pytest.raises(
                ValueError, match=rf"needs {rows + dense:,} .* and {2 * dense:,} of"
            ):
                enough.load("other")
            enough.load("m")
        assert store.tables() == {"m/items": 4 * DIM}
        by_version = options_over(store, rows_by_version=True)
        with ModelRepository(tmp_path, by_version, max_bytes=rows + dense) as enough:
            enough.load("m")
            enough.unload("m")
            enough.load("other")


def test_updates_reach_lookups_and_outlive_the_server(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    models = tmp_path / "models"
    deploy_stamped(models, 1)

    def serve(check: Callable[[ModelRepository], None]) -> None:
        with RocksDBStore(tmp_path / "rows") as store:
            options = options_over(store)
            with ModelRepository(models, options, records=store) as repository:
                repository.start()
                check(repository)

    def update(repository: ModelRepository) -> None:
        apply_stamp(repository, 5, version=3)
        assert stamps(repository) == ("1", [5.0], [1.0])
        repository.swap_dense("m", weights(5), 3)
        assert stamps(repository) == ("3", [5.0], [5.0])

    serve(update)
    # Version 1 is loaded again, and its rows are those of version 3, to which the updates came.
    serve(lambda repository: check_stamps(repository, ("1", [5.0], [1.0])))
    deploy_stamped(models, 2)
    serve(lambda repository: check_stamps(repository, ("2", [5.0], [2.0])))
    deploy_stamped(models, 4)
    serve(lambda repository: check_stamps(repository, ("4", [4.0], [4.0])))


def check_stamps(repository: ModelRepository, expected: Any) -> None:
    assert stamps(repository) == expected


def test_rows_that_a_newer_version_lacks_are_deleted(tmp_path: Path) -> None:
    class Dynamic(nn.Module):
        def __init__(self, ids: list[int]) -> None:
            super().__init__()
            dynamic = torchembed.Dynamic(missing="zeros")
            self.items = torchembed.EmbeddingBag(64, DIM, mode="sum", dynamic=dynamic)
            self.train()(torch.tensor(ids).view(-1, 1))

        def forward(self, ids: Tensor) -> Tensor:
            return self.items(ids)

    examples = torch.zeros(2, 1, dtype=torch.int64)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        for version, ids in enumerate(([1, 2, 3], [2, 3, -7]), 1):
            deploy(Dynamic(ids), tmp_path, name="m", version=version, examples=examples)
            repository.load("m")
        answer = repository.model("m").answer({"ids": np.array([[1], [2], [3], [-7]])})
        assert answer.outputs["default_rows"].tolist() == [1, 0, 0, 0]


def test_updates_of_rows_by_version_go_to_their_version(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1)
    deploy_stamped(tmp_path, 2)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, num_latest_versions=2)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            apply_stamp(repository, 7, version=1)
            repository.swap_dense("m", weights(7), 1)
            assert stamps(repository, version="1") == ("1", [7.0], [7.0])
            assert stamps(repository) == ("2", [2.0], [2.0])
            with pytest.raises(UnknownModelError, match="takes rows of version 3, and is not"):
                apply_stamp(repository, 7, version=3)
            with pytest.raises(UnknownModelError, match="got 3"):
                repository.swap_dense("m", weights(7), 3)


def test_a_dense_part_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        for tensors, message in (
            ({}, r"tensors must be \['deep.weight'\], got \[\]"),
            ({"deep.weight": torch.ones(2, 1)}, r"must be torch.float32 \[1, 1\], got .*\[2, 1\]"),
            ({"deep.weight": torch.ones(1, 1).half()}, "got torch.float16"),
        ):
            with pytest.raises(ValueError, match=message):
                repository.swap_dense("m", tensors, 2)
        with pytest.raises(UnknownModelError, match="takes rows of version 1, and is not"):
            repository.apply_rows("m", "x", torch.arange(1), torch.ones(1, DIM), version=1)
        assert stamps(repository) == ("1", [1.0], [1.0])
        repository.swap_dense("m", weights(9), 9)
        assert stamps(repository) == ("9", [1.0], [9.0])
        assert repository.roll_back("m") == "1"
        assert stamps(repository) == ("1", [1.0], [1.0])


def test_weights_are_rounded_to_the_dtype_of_the_version(tmp_path: Path) -> None:
    deploy_stamped(tmp_path, 1, dense_dtype=torch.bfloat16)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        repository.swap_dense("m", {"deep.weight": torch.full((1, 1), 1 + 2**-8)}, 2)
        # 1 + 2**-8 lies between two bfloat16 numbers, of which the even one is 1.
        assert stamps(repository) == ("2", [1.0], [1.0])
        with pytest.raises(ValueError, match=r"must be torch.bfloat16 .*, got torch.float16"):
            repository.swap_dense("m", {"deep.weight": torch.ones(1, 1).half()}, 3)


def test_models_share_tables_by_the_name_in_stores(tmp_path: Path) -> None:
    for name in ("m", "n"):
        deploy_stamped(tmp_path, 1, name, store_names={"items": "shared/items"})
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        assert list(repository.lookups()) == ["shared/items"]
        apply_stamp(repository, 6, version=2)
        assert stamps(repository, "n") == ("1", [6.0], [1.0])
        repository.unload("m")
        assert stamps(repository, "n") == ("1", [6.0], [1.0])
        repository.unload("n")
        assert repository.lookups() == {}


def test_every_answer_under_load_is_of_one_version(tmp_path: Path) -> None:
    """Threads ask while versions are loaded, rolled back and swapped: nothing fails or is torn."""
    deploy_stamped(tmp_path, 1)
    failures: list[object] = []
    seen: set[str] = set()
    done = threading.Event()
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            model = repository.model("m")

            def ask() -> None:
                while not done.is_set():
                    try:
                        answer = model.answer(IDS)
                    except Exception as error:  # noqa: BLE001 - reported below
                        failures.append(error)
                        return
                    values = [v for n, v in answer.outputs.items() if n != "default_rows"]
                    found = {float(x) for array in values for x in np.unique(array)}
                    if found != {float(answer.version)} or answer.num_default_rows:
                        failures.append((answer.version, found, answer.num_default_rows))
                    seen.add(answer.version)

            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            for version in range(2, 8):
                deploy_stamped(tmp_path, version)
                repository.load("m")
                assert repository.roll_back("m") == str(version - 1)
                repository.load("m")
                wait_until(lambda: str(version) in seen or bool(failures))  # noqa: B023
            done.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert seen >= set("234567")
