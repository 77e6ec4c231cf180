"""A server's process whose memory is spent or whose rows are corrupt."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.server_processes import RunningServer, running_server
from tests.support.waiting import wait_until
from torchembed.serving.__main__ import main
from torchembed.serving.models import deploy
from torchembed.stores import RocksDBStore

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")

DIM, NUM_ROWS = 16, 5000
ROW_BYTES = 4 * DIM + 8
"""Of a row and its key."""
MAX_MEMORY_BYTES = 5 * NUM_ROWS * ROW_BYTES


class Rows(nn.Module):
    """Gives rows back, which are ``version`` in all columns."""

    def __init__(self, version: int, num_rows: int) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(num_rows, DIM, mode="sum")
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            self.items.weight.fill_(float(version))

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids) * self.scale


def deployed(models: Path, version: int, num_rows: int = NUM_ROWS) -> None:
    examples = torch.zeros(3, 1, dtype=torch.int64)
    deploy(Rows(version, num_rows), models, name="m", version=version, examples=examples)


def answer(server: RunningServer, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    """The rows of ids, and for each of them how many defaults it was given."""
    import tritonclient.http

    client = tritonclient.http.InferenceServerClient(server.http)
    tensor = tritonclient.http.InferInput("ids", [len(ids), 1], "INT64")
    tensor.set_data_from_numpy(np.array(ids, np.int64)[:, None])
    found = client.infer("m", [tensor])
    client.close()
    return found.as_numpy("output"), found.as_numpy("default_rows").tolist()


@contextlib.contextmanager
def asking(server: RunningServer, version: int) -> Iterator[list[int]]:
    """Ask on and on for rows of all parts of the table, each of which must be of ``version``."""
    ended, failures, num_ids = threading.Event(), list[BaseException](), list[int]()
    random = np.random.default_rng(0)

    def ask() -> None:
        try:
            while not ended.is_set():
                ids = random.integers(0, NUM_ROWS, 64).tolist()
                rows, defaults = answer(server, ids)
                assert (rows == version).all() and not any(defaults)
                num_ids.append(len(ids))
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_until(lambda: len(num_ids) > 0 or bool(failures))
        yield num_ids
        before = len(num_ids)
        wait_until(lambda: len(num_ids) > before or bool(failures))
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


def failed_load(server: RunningServer) -> str:
    import tritonclient.http

    client: Any = tritonclient.http.InferenceServerClient(server.http, network_timeout=60)
    with pytest.raises(tritonclient.http.InferenceServerException) as caught:
        client.load_model("m")
    (reason,) = {e["reason"] for e in client.get_model_repository_index() if e["reason"]}
    client.close()
    assert caught.value.status() == "400" and reason in str(caught.value)
    return str(caught.value)


def test_a_version_too_large_for_memory_is_refused_and_answers_go_on(
    tmp_path: Path,
) -> None:
    models, rows, config = tmp_path / "models", tmp_path / "rows", tmp_path / "server.yaml"
    config.write_text(
        f"max_memory_bytes: {MAX_MEMORY_BYTES}\nmodels: [{{name: m, rows: version}}]\n"
    )
    flags = ("--config", str(config), "--persistent", str(rows))
    deployed(models, 1)
    with running_server(models, tmp_path / "log", *flags) as server:
        with asking(server, 1) as num_ids:
            deployed(models, 2, 10 * NUM_ROWS)
            error = failed_load(server)
            assert "model m cannot be loaded: version 2 of model m needs" in error
            assert f"of {MAX_MEMORY_BYTES:,} are left" in error
        assert sum(num_ids) > 0
        # An id that the table cannot have is refused, and the answers to others go on.
        for unknown in (NUM_ROWS, -1, 2**63 - 1, -(2**63)):
            with pytest.raises(
                Exception, match=rf"ids of feature ids must be in \[0, {NUM_ROWS}\), got {unknown}"
            ):
                answer(server, [0, unknown])
        assert server.end() == 0


def test_rows_that_are_corrupt_are_named_and_nothing_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, rows = tmp_path / "models", tmp_path / "rows"
    deployed(models, 1)
    with RocksDBStore(rows) as store:
        keys = torch.arange(100)
        store.table("m/items", 4 * DIM).write(keys, torch.zeros(100, 4 * DIM, dtype=torch.uint8))
    (manifest,) = (rows / "rows").glob("MANIFEST-*")
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 0x10
    manifest.write_bytes(content)
    free = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    assert main(["--models", str(models), "--persistent", str(rows), *free]) == 2
    written = capsys.readouterr()
    (line,) = written.err.splitlines()
    assert written.out == "" and line.startswith("torchembed.serving: ")
    assert str(rows) in line and "corrupt" in line.lower()
