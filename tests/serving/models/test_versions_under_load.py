"""Versions and dense parts that change, and models that are let go of, while threads ask."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from torchembed.serving.interface import Answer, ModelNotReadyError, ServedModel
from torchembed.serving.models import BatchOptions, ModelRepository, deploy
from torchembed.serving.models.loaded_version import LoadedVersion
from torchembed.stores import MemoryStore

NUM_ROWS, DIM = 40, 3
IDS = np.arange(8).reshape(4, 2)
BATCHED = BatchOptions(max_delay_seconds=1e-3, num_instances=2)


class Clicks(nn.Module):
    """Random rows and a random tower; equal seeds of rows give equal rows."""

    def __init__(self, row_seed: int, dense_seed: int) -> None:
        super().__init__()
        torch.manual_seed(row_seed)
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        torch.manual_seed(dense_seed)
        self.deep = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.deep(self.items(ids))[:, 0]


def deployed(folder: Path, version: int, name: str = "m", **options: object) -> None:
    """Deploy a version whose rows and tower are of its number."""
    examples = torch.zeros(3, 2, dtype=torch.int64)
    model = Clicks(version, version)
    deploy(model, folder, name=name, version=version, examples=examples, **options)  # type: ignore[arg-type]


def expected(row_seed: int, dense_seed: int) -> np.ndarray:
    with torch.no_grad():
        return Clicks(row_seed, dense_seed)(torch.from_numpy(IDS)).numpy()


def check(answer: Answer, forward: np.ndarray) -> None:
    np.testing.assert_allclose(answer.outputs["output"], forward, rtol=0, atol=1e-6)
    assert answer.num_default_rows == 0


@contextlib.contextmanager
def asking(model: ServedModel, forwards: dict[str, np.ndarray]) -> Iterator[set[str]]:
    """Three threads ask on and on, and compare with the forward of the version that is named; the
    versions they saw are what it gives."""
    done, seen, failures = threading.Event(), set[str](), list[BaseException]()

    def ask() -> None:
        try:
            while not done.is_set():
                answer = model.answer({"ids": IDS})
                check(answer, forwards[answer.version])
                seen.add(answer.version)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("batching", [None, BATCHED], ids=["alone", "batched"])
def test_each_answer_is_of_the_dense_part_it_names(
    tmp_path: Path, batching: BatchOptions | None
) -> None:
    deployed(tmp_path, 1)
    forwards = {str(n): expected(1, n) for n in range(1, 12)}
    with MemoryStore() as store:
        options = options_over(store, batching=batching)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            with asking(repository.model("m"), forwards) as seen:
                for version in range(2, 12):
                    repository.swap_dense("m", dense_tensors(Clicks(1, version)), version)
                    wait_until(lambda: str(version) in seen)  # noqa: B023
                    if version % 3 == 0:
                        assert repository.roll_back("m") == str(version - 1)
    assert seen >= {str(n) for n in range(2, 12)}


@pytest.mark.parametrize("batching", [None, BATCHED], ids=["alone", "batched"])
def test_each_answer_is_of_the_version_it_names(
    tmp_path: Path, batching: BatchOptions | None
) -> None:
    deployed(tmp_path, 1)
    forwards = {str(n): expected(n, n) for n in range(1, 6)}
    with MemoryStore() as store:
        options = options_over(store, batching=batching, rows_by_version=True)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            with asking(repository.model("m"), forwards) as seen:
                for version in range(2, 6):
                    deployed(tmp_path, version)
                    repository.load("m")
                    wait_until(lambda: str(version) in seen)  # noqa: B023
    assert seen >= {"2", "3", "4", "5"}


def test_unloaded_models_end_their_requests_and_come_back(tmp_path: Path) -> None:
    deployed(tmp_path, 1)
    forward = expected(1, 1)
    with MemoryStore() as store, ModelRepository(tmp_path, options_over(store)) as repository:
        repository.start()
        model, done, refused = repository.model("m"), threading.Event(), threading.Event()
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                while not done.is_set():
                    try:
                        check(model.answer({"ids": IDS}), forward)
                    except ModelNotReadyError:
                        refused.set()
            except BaseException as error:  # noqa: BLE001 - reported below
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            repository.unload("m")
            assert repository.lookups() == {}
            assert refused.wait(60)
            repository.load("m")
            refused.clear()
        check(model.answer({"ids": IDS}), forward)
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_requests_under_way_are_answered_by_the_version_that_is_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed(tmp_path, 1)
    reached, let_go = threading.Event(), threading.Event()
    answer_request = LoadedVersion.answer_request

    def held(version: LoadedVersion, *request: Any) -> Answer:
        reached.set()
        assert let_go.wait(60)
        return answer_request(version, *request)

    with MemoryStore() as store:
        options = options_over(store, batching=BatchOptions(max_delay_seconds=0.0))
        with ModelRepository(tmp_path, options) as repository, ThreadPoolExecutor(3) as threads:
            repository.start()
            model = repository.model("m")
            check(model.answer({"ids": IDS}), expected(1, 1))
            monkeypatch.setattr(LoadedVersion, "answer_request", held)
            # One is computed, and the other one waits.
            answers = [threads.submit(model.answer, {"ids": IDS})]
            assert reached.wait(60)
            answers.append(threads.submit(model.answer, {"ids": IDS}))
            wait_until(lambda: repository.batches()[0].num_waiting == 1)
            unloading = threads.submit(repository.unload, "m")
            wait_until(lambda: repository.versions("m") == [])
            assert not unloading.done()
            let_go.set()
            unloading.result()
            with pytest.raises(ModelNotReadyError, match="model m is not loaded: unloaded"):
                model.answer({"ids": IDS})
            for answer in answers:
                check(answer.result(), expected(1, 1))


def test_a_swap_of_another_version_is_rolled_back_there(tmp_path: Path) -> None:
    deployed(tmp_path, 1)
    deployed(tmp_path, 2)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, num_latest_versions=2)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            repository.swap_dense("m", dense_tensors(Clicks(1, 9)), 1)
            check(repository.model("m", "1").answer({"ids": IDS}), expected(1, 9))
            assert repository.roll_back("m") == "2"
            check(repository.model("m").answer({"ids": IDS}), expected(2, 2))
            check(repository.model("m", "1").answer({"ids": IDS}), expected(1, 1))


def test_loading_again_never_answers_by_an_older_version(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        deployed(tmp_path, version)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, num_latest_versions=3)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            deployed(tmp_path, 4)
            (tmp_path / "m" / "4" / "dense.pt2").write_bytes(b"")
            with pytest.raises(ValueError, match=r"model m cannot be loaded: .*is corrupt"):
                repository.load("m")
            assert repository.model("m").answer({"ids": IDS}).version == "3"
            assert repository.roll_back("m") == "2"


def test_the_version_that_answers_stays_while_several_are_loaded(tmp_path: Path) -> None:
    deployed(tmp_path, 1)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True, num_latest_versions=2)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            deployed(tmp_path, 2)
            repository.load("m")
            assert repository.roll_back("m") == "1"
            deployed(tmp_path, 3)
            deployed(tmp_path, 4)
            (tmp_path / "m" / "4" / "dense.pt2").write_bytes(b"")
            with pytest.raises(ValueError, match=r"model m cannot be loaded: .*is corrupt"):
                repository.load("m")
            check(repository.model("m").answer({"ids": IDS}), expected(1, 1))


def test_rows_that_another_model_answers_by_stay(tmp_path: Path) -> None:
    for name in ("m", "n"):
        deployed(tmp_path, 1, name, store_names={"items": "shared"})
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            repository.unload("m")
            check(repository.model("n").answer({"ids": IDS}), expected(1, 1))
            repository.unload("n")
            assert store.table("shared@1", 4 * DIM).num_rows() == 0
            repository.load("m")
            check(repository.model("m").answer({"ids": IDS}), expected(1, 1))


def test_versions_are_let_go_of_where_their_rows_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployed(tmp_path, 1)
    with MemoryStore() as store:
        options = options_over(store, rows_by_version=True)
        with ModelRepository(tmp_path, options) as repository:
            repository.start()
            store.close()
            with caplog.at_level(logging.WARNING):
                repository.unload("m")
            assert repository.versions("m") == []
    assert "rows of table m/items@1 stay in the stores: " in caplog.text
