"""Exports behind URLs: in fsspec's memory, and in a server that speaks S3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchembed
from tests.support.object_stores import download, folder_of_url
from torchembed.export import export_onnx, export_pt2, load_pt2

IDS = torch.tensor([[1, 2], [3, 4], [0, 9]])


@pytest.fixture(params=["memory", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A folder behind a URL; nothing may come to the working directory meanwhile."""
    monkeypatch.chdir(tmp_path)
    with folder_of_url(request.param) as folder:
        yield folder
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(torchembed.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 1))


def file_system(url: str) -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs(url)[0]


def uploads(url: str, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[str]:
    """Names of the files that are uploaded from now on; that of the name ``failing`` fails."""
    files, names = file_system(url), []
    put_file = files.put_file

    def put(source: str, place: str) -> None:
        names.append(Path(place).name)
        if names[-1] == failing:
            raise OSError("the connection was lost")
        put_file(source, place)

    monkeypatch.setattr(files, "put_file", put)
    return names


def check_answers(folder: Path, model: nn.Module) -> None:
    """onnxruntime answers from ``c.onnx`` as the model does."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
    session = onnxruntime.InferenceSession(folder / "c.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": IDS.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(IDS).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 1])
def test_a_graph_comes_after_its_weights(
    url: str,
    model: nn.Module,
    max_file_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    names = uploads(url, monkeypatch)
    export_onnx(model, IDS, f"{url}/deep/c.onnx", max_file_bytes=max_file_bytes)
    found = download(f"{url}/deep")
    assert names == (["c.onnx"] if max_file_bytes > 1 else ["c.onnx.data", "c.onnx"])
    assert sorted(found) == sorted(names)
    folder = tmp_path_factory.mktemp("downloaded")
    for name, content in found.items():
        (folder / name).write_bytes(content)
    check_answers(folder, model)


@pytest.mark.parametrize("there", ["c.onnx", "c.onnx.data"])
def test_nothing_is_overwritten(url: str, model: nn.Module, there: str) -> None:
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    file_system(url).pipe_file(f"{url}/{there}", b"?")
    with pytest.raises(FileExistsError, match=f"not be there yet, and {url}/{there} is; remove it"):
        export_onnx(model, IDS, f"{url}/c.onnx")
    assert download(url) == {there: b"?"}


@pytest.mark.parametrize("failing", ["c.onnx", "c.onnx.data"])
def test_an_upload_that_fails_leaves_nothing(
    url: str, model: nn.Module, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    with monkeypatch.context() as patch:
        uploads(url, patch, failing)
        with pytest.raises(OSError, match="the connection was lost"):
            export_onnx(model, IDS, f"{url}/c.onnx", max_file_bytes=1)
    assert download(url) == {}
    export_onnx(model, IDS, f"{url}/c.onnx", max_file_bytes=1)
    assert sorted(download(url)) == ["c.onnx", "c.onnx.data"]


def test_packages_are_uploaded(model: nn.Module, tmp_path: Path) -> None:
    with folder_of_url("memory") as url:
        export_pt2(model, IDS, f"{url}/c.pt2")
        with pytest.raises(FileExistsError, match=f"and {url}/c.pt2 is; remove it"):
            export_pt2(model, IDS, f"{url}/c.pt2")
        found = download(url)
        with pytest.raises(ValueError, match=f"must be a local file, got {url}/c.pt2; copy the"):
            load_pt2(f"{url}/c.pt2")
    assert list(found) == ["c.pt2"]
    (tmp_path / "c.pt2").write_bytes(found["c.pt2"])
    answer = load_pt2(tmp_path / "c.pt2")({"input": IDS})
    torch.testing.assert_close(answer, {"output": model(IDS).detach()}, rtol=0, atol=1e-5)


def test_urls_of_local_files_are_local(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    export_onnx(model, IDS, f"file://{tmp_path}/c.onnx")
    check_answers(tmp_path, model)
    with pytest.raises(FileExistsError, match=f"and file://{tmp_path}/c.onnx is; remove it"):
        export_onnx(model, IDS, f"file://{tmp_path}/c.onnx")


def test_wrong_urls_are_named(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("fsspec", reason="URLs are read with fsspec")
    known = "path must be a local path or a URL that fsspec knows, got 'clouds://b/c.pt2'"
    with pytest.raises(ValueError, match=known):
        export_pt2(model, IDS, "clouds://b/c.pt2")
    with pytest.raises(ValueError, match=r"must be a string where it is a URL, got .*lost a slash"):
        export_pt2(model, IDS, Path("s3://b/c.pt2"))
    assert list(tmp_path.iterdir()) == []
