"""Checkpoints and exports in a server that speaks S3."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchembed
from tests.support.object_stores import download, folder_of_url
from torchembed.checkpoints import export_rows, open_rows
from torchembed.tables import RowChunk
from torchembed.training import (
    CheckpointFolder,
    TrainingRun,
    export_safetensors,
    open_safetensors,
)

NUM_ROWS = 300


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with folder_of_url("s3") as url:
        yield url


def files_of(url: str) -> Any:
    """The file system behind ``url``."""
    from fsspec.core import url_to_fs

    return url_to_fs(url)[0]


def make_run(seed: int) -> TrainingRun:
    torch.manual_seed(seed)
    model = nn.Sequential(torchembed.EmbeddingBag(NUM_ROWS, 8, mode="sum"), nn.Linear(8, 1))
    optimizer = torchembed.optim.Adagrad.with_dense(model.parameters(), lr=0.1)
    return TrainingRun(model=model, optimizers=[optimizer])


def take_step(run: TrainingRun, step: int) -> None:
    ids = torch.randint(NUM_ROWS, (16, 3), generator=torch.Generator().manual_seed(step))
    run.model(ids).square().mean().backward()
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_a_run_resumes(bucket: str) -> None:
    url, run = f"{bucket}/run", make_run(0)
    with contextlib.closing(CheckpointFolder(url, keep=2)) as checkpoints:
        for step in range(1, 4):
            take_step(run, step)
            checkpoints.save(step, run, wait=step != 2)
        assert checkpoints.steps() == [2, 3]
    resumed = make_run(1)
    assert CheckpointFolder(url).load(resumed) == 3
    for either in (run, resumed):
        take_step(either, 4)
    assert_same(resumed.model, run.model)


def test_a_save_that_fails_leaves_what_was_there(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, run = f"{bucket}/failing", make_run(0)
    with contextlib.closing(CheckpointFolder(url)) as checkpoints:
        checkpoints.save(1, run)
        before = download(url)
        with monkeypatch.context() as patch:

            def fail(*args: object, **options: object) -> None:
                raise OSError("the connection was lost")

            # The marker's, after all other files were written.
            patch.setattr(files_of(url), "mv", fail)
            with pytest.raises(OSError, match="the connection was lost"):
                checkpoints.save(2, run)
        after = download(url)
        assert after.items() >= before.items()
        assert any(name.startswith("step-000000002/") for name in after)
        assert checkpoints.steps() == [1]
        assert CheckpointFolder(url).load(make_run(1)) == 1
        checkpoints.save(3, run)
        assert not any(name.startswith("step-000000002/") for name in download(url))


def test_a_file_that_was_changed_is_named(bucket: str) -> None:
    url, run = f"{bucket}/changed", make_run(0)
    with contextlib.closing(CheckpointFolder(url)) as checkpoints:
        checkpoints.save(1, run)
    name = next(name for name in download(url) if name.endswith(".distcp"))
    path = f"{url}/{name}"
    files_of(url).pipe_file(path, download(url)[name][:-1] + b"?")
    with pytest.raises(ValueError, match=r"step-000000001/.*distcp must have \d+ bytes and CRC-32"):
        CheckpointFolder(url).load(run)


def test_rows_are_exported(bucket: str) -> None:
    keys = torch.arange(50) * 7 - 100
    chunk = RowChunk(keys, torch.randn(50, 4), {"sum": torch.rand(50)}, scores=keys % 3)
    export_rows([chunk], f"{bucket}/rows", max_file_bytes=600)
    assert len(download(f"{bucket}/rows")) > 2
    found = list(open_rows(f"{bucket}/rows"))
    assert torch.equal(torch.cat([part.keys for part in found]), keys)
    assert torch.equal(torch.cat([part.rows for part in found]), chunk.rows)


def test_models_are_exported(bucket: str) -> None:
    model = make_run(0).model
    for url, limit in ((f"{bucket}/whole", 10**9), (f"{bucket}/divided", 100)):
        export_safetensors(model, url, max_file_bytes=limit)
        found = open_safetensors(url)
        assert found.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[name], tensor)
        with pytest.raises(FileExistsError, match=rf"must hold nothing yet, and {url} holds model"):
            export_safetensors(model, url)
    assert list(download(f"{bucket}/whole")) == ["model.safetensors"]
    one = open_safetensors(f"{bucket}/whole/model.safetensors")
    assert torch.equal(one["1.bias"], model[1].bias)  # type: ignore[index]


def test_an_export_that_was_stopped_is_none(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, url = make_run(0).model, f"{bucket}/stopped"
    export_safetensors(model, url, max_file_bytes=100)
    files_of(url).rm_file(f"{url}/model.safetensors.index.json")
    with pytest.raises(FileNotFoundError, match=r"holds model-00001-of-0000\d.* was stopped; remo"):
        open_safetensors(url)
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors\.index"):
        open_safetensors(f"{bucket}/nothing")

    from torchembed.checkpoints.exports import whole_model

    def fail(*args: object) -> None:
        raise OSError("no such row")

    monkeypatch.setattr(whole_model, "bytes_of", fail)
    with pytest.raises(OSError, match="no such row"):
        export_safetensors(model, f"{bucket}/failed")
    assert download(f"{bucket}/failed") == {}
