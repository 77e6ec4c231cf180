"""One process at a time saves in a folder, and its end, however it ends, leaves the folder free."""

import gc
import json
import os
import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import fsspec
import pytest
from torch import nn

from tests.support.fork_server import fork_server
from torchembed.training import CheckpointFolder, TrainingRun

LIMIT_SECONDS = 240.0


def new_run() -> TrainingRun:
    return TrainingRun(model=nn.Linear(2, 2))


def serve(path: Path, orders: Connection) -> None:
    """Do what comes, as another run, and answer with the error."""
    folder = CheckpointFolder(path)
    actions = {
        "save": lambda: folder.save(1, new_run()),
        "claim": folder.claim,
        "close": folder.close,
        "load": lambda: folder.load(new_run()),
    }
    while True:
        order = orders.recv()
        if order == "fork and wait":
            child = os.fork()
            if child == 0:
                signal.pause()
            orders.send(str(child))
            continue
        try:
            actions[order]()
            orders.send("")
        except RuntimeError as error:
            orders.send(str(error))


class OtherRun:
    """A process of its own that saves in a folder."""

    def __init__(self, path: Path) -> None:
        context = fork_server()
        self._orders, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(path, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def does(self, order: str) -> str:
        """The error, or an empty text."""
        self._orders.send(order)
        assert self._orders.poll(LIMIT_SECONDS), order
        return self._orders.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def test_a_second_process_is_refused_by_name_while_the_first_lives(tmp_path: Path) -> None:
    with OtherRun(tmp_path) as first, OtherRun(tmp_path) as second, OtherRun(tmp_path) as third:
        assert first.does("save") == ""
        for order in ("claim", "save"):
            assert re.fullmatch(
                rf"one run at a time may save in {tmp_path}, and process {first.process.pid} on "
                r"host \S+, since \S+, does; end that run, or give this one another folder",
                second.does(order),
            )
        assert second.does("load") == ""
        first.kill()
        assert second.does("claim") == ""
        assert second.does("save") == ""
        assert "one run at a time" in third.does("save")
        assert second.does("close") == ""
        CheckpointFolder(tmp_path).save(3, new_run())
        assert "one run at a time" not in second.does("save")


def test_a_forked_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    """A killed rank's workers live on for a while."""
    with OtherRun(tmp_path) as first, OtherRun(tmp_path) as second:
        assert first.does("save") == ""
        child = int(first.does("fork and wait"))
        try:
            assert second.does("claim").startswith("one run at a time")
            first.kill()
            assert second.does("claim") == ""
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_may_have_several_folder_objects(tmp_path: Path) -> None:
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    for folder in (first, second, first):
        folder.save(1, new_run())
    with OtherRun(tmp_path) as other:
        first.close()
        assert other.does("claim").startswith("one run at a time")
        del second
        gc.collect()
        assert other.does("claim") == ""


def test_a_folder_that_was_emptied_is_claimed_anew(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, new_run())
    (tmp_path / "writer.json").unlink()
    folder.save(2, new_run())
    with OtherRun(tmp_path) as other:
        assert other.does("claim").startswith("one run at a time")


def test_without_locks_the_last_run_to_claim_has_the_folder(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    folder = CheckpointFolder(url)
    folder.claim()
    files = fsspec.filesystem("memory")
    ours = json.loads(files.cat_file(f"{url}/writer.json"))
    assert ours["process"] == os.getpid()
    folder.save(1, new_run())
    other = {**ours, "token": "0", "process": 77, "host": "elsewhere"}
    files.pipe(f"{url}/writer.json", json.dumps(other).encode())
    with pytest.raises(RuntimeError, match=r"and process 77 on host elsewhere, since .* does"):
        folder.claim()
    with pytest.raises(RuntimeError, match=r"and process 77 on host elsewhere, since .* does"):
        folder.save(2, new_run())
    assert folder.steps() == [1]
    resumed = CheckpointFolder(url)
    with pytest.raises(RuntimeError, match="process 77"):
        resumed.claim()  # of the same process, which has lost the folder
    for lost in (folder, resumed):
        lost.close()
    resumed = CheckpointFolder(url)
    resumed.claim()
    resumed.save(2, new_run())
    assert resumed.steps() == [1, 2]


class Intruder:
    """While it is pickled, another run claims the folder."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __reduce__(self) -> tuple[type, tuple[str]]:
        fsspec.filesystem("memory").pipe(f"{self.url}/writer.json", b'{"token": "0"}')
        return Intruder, (self.url,)


def test_a_save_that_another_run_overtakes_is_not_completed(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"

    class Disturbed(nn.Linear):
        def get_extra_state(self) -> Intruder:
            return Intruder(url)

    folder = CheckpointFolder(url)
    with pytest.raises(
        RuntimeError, match=r"one run at a time may save in .*, and another process"
    ):
        folder.save(1, TrainingRun(model=Disturbed(1, 1)))
    assert folder.steps() == []
