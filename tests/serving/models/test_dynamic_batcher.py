"""Requests that are answered together get what they would get alone."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.served_lookups import options_over
from tests.support.waiting import wait_until
from tests.zoo.served_models import MODELS
from torchembed.serving.interface import BusyError, InvalidRequestError
from torchembed.serving.models import BatchOptions, ModelRepository, deploy
from torchembed.stores import MemoryStore


@pytest.fixture(scope="module", params=["tasks", "weighted", "sequence", "columns"])
def models(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    """A case, the folder of its model, and the model without batches."""
    torch.manual_seed(3)
    case, folder = MODELS[request.param](), tmp_path_factory.mktemp("models")
    deploy(case.model, folder, name="m", version=1, examples=case.examples(4))
    with MemoryStore() as store, ModelRepository(folder, options_over(store)) as repository:
        repository.start()
        yield case, folder, repository.model("m")


def batched(folder: Path, store: MemoryStore, **options: Any) -> ModelRepository:
    repository = ModelRepository(folder, options_over(store, batching=BatchOptions(**options)))
    repository.start()
    return repository


@pytest.mark.parametrize("num_instances", [1, 3])
def test_answers_of_a_batch_are_those_of_its_requests(models: Any, num_instances: int) -> None:
    case, folder, alone = models
    sizes = [1, 4, 2, 7, 1, 3, 5, 2, 9, 1]
    requests = [case.request(case.examples(size)) for size in sizes]
    options = {"max_samples": 12, "max_delay_seconds": 0.05, "num_instances": num_instances}
    with (
        MemoryStore() as store,
        batched(folder, store, **options) as repository,
        ThreadPoolExecutor(len(sizes)) as threads,
    ):
        answers = list(threads.map(repository.model("m").answer, requests))
        totals = repository.batches()
    for request, answer in zip(requests, answers, strict=True):
        expected = alone.answer(request)
        assert answer.outputs.keys() == expected.outputs.keys()
        assert answer.num_default_rows == expected.num_default_rows
        for name, values in expected.outputs.items():
            np.testing.assert_allclose(answer.outputs[name], values, rtol=1e-5, atol=1e-6)
    ((model, version, num_batches, num_waiting, seconds),) = totals
    assert (model, version, num_waiting) == ("m", "1", 0)
    assert sum(sizes) / 12 <= num_batches <= len(sizes) and seconds > 0


def test_batches_of_versions_that_were_let_go_of_stay_counted(tmp_path: Path) -> None:
    case = MODELS["tasks"]()
    examples, request = case.examples(4), case.request(case.examples(3))
    expected: dict[str, int] = {}
    with MemoryStore() as store:
        options = options_over(store, batching=BatchOptions(max_delay_seconds=0.0))
        with ModelRepository(tmp_path, options) as repository:
            for version in range(1, 19):
                deploy(case.model, tmp_path, name="m", version=version, examples=examples)
                repository.load("m")
                for _ in range(2):
                    repository.model("m").answer(request)
                expected[str(version)] = 2
                if version == 4:
                    repository.unload("m")
            found = {t.version: t.num_batches for t in repository.batches()}
    assert found == {version: expected[version] for version in list(expected)[-16:]}


class Gate:
    """Holds batches back, so that requests wait behind the first for as long as a test needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchembed.serving.models.loaded_version import LoadedVersion

        self.opened, self.reached, self.num_samples = threading.Event(), threading.Event(), []
        answer_request = LoadedVersion.answer_request

        def held(version: LoadedVersion, request: Any, outputs: Any = None) -> Any:
            self.num_samples.append(request.num_samples)
            self.reached.set()
            assert self.opened.wait(60)
            return answer_request(version, request, outputs)

        monkeypatch.setattr(LoadedVersion, "warm", lambda version: None)
        monkeypatch.setattr(LoadedVersion, "answer_request", held)


@pytest.fixture
def dlrm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    case = MODELS["dlrm"]()
    deploy(case.model, tmp_path, name="m", version=1, examples=case.examples(4))
    gate = Gate(monkeypatch)
    with MemoryStore() as store, ThreadPoolExecutor(16) as threads:
        options = {"max_samples": 6, "max_delay_seconds": 0.0, "max_waiting_requests": 4}
        with batched(tmp_path, store, **options) as repository:
            yield case, repository, gate, threads
            gate.opened.set()


def wait_until_waiting(repository: ModelRepository, number: int) -> None:
    lease = repository._models["m"].find()
    batcher: Any = lease.answering
    wait_until(lambda: len(batcher._waiting) == number)


def test_batches_have_at_most_so_many_samples_and_the_queue_so_many_requests(dlrm: Any) -> None:
    case, repository, gate, threads = dlrm
    model = repository.model("m")
    asked = [case.request(case.examples(size)) for size in (2, 3, 2, 8, 1)]
    answers = [threads.submit(model.answer, asked[0])]
    assert gate.reached.wait(60)
    for number, request in enumerate(asked[1:], 1):
        answers.append(threads.submit(model.answer, request))
        wait_until_waiting(repository, number)
    with pytest.raises(BusyError, match="model m has 4 requests waiting, as many as may"):
        model.answer(asked[0])
    gate.opened.set()
    assert [len(a.result().outputs["output"]) for a in answers] == [2, 3, 2, 8, 1]
    # 3 and 2 fit into 6, and 8 is larger than any batch.
    assert gate.num_samples == [2, 5, 8, 1]


def test_a_request_that_does_not_fit_fails_alone(dlrm: Any) -> None:
    case, repository, gate, threads = dlrm
    model = repository.model("m")
    good = threads.submit(model.answer, case.request(case.examples(2)))
    bad = case.request(case.examples(2)) | {"f0": np.array([[-5], [0]])}
    with pytest.raises(InvalidRequestError, match="got -5"):
        model.answer(bad)
    gate.opened.set()
    assert good.result().outputs["output"].shape[0] == 2


def test_what_a_batch_raises_each_of_its_requests_raises(
    dlrm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchembed.serving.models.loaded_version import LoadedVersion

    case, repository, _, threads = dlrm

    def fail(*_: Any) -> Any:
        raise OSError("the rows are away")

    monkeypatch.setattr(LoadedVersion, "answer_request", fail)
    model = repository.model("m")
    answers = [threads.submit(model.answer, case.request(case.examples(1))) for _ in range(3)]
    for answer in answers:
        with pytest.raises(OSError, match="the rows are away"):
            answer.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"max_waiting_requests": 0}, "max_waiting_requests must be at least 1, got 0"),
        ({"num_instances": 0}, "num_instances must be at least 1, got 0"),
        ({"max_delay_seconds": -1.0}, "max_delay_seconds must not be negative, got -1.0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchOptions(**options)
