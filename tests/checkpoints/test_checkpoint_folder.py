"""Which checkpoints there are, which are kept, and what is wrong with a damaged one."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from torchembed.training import CheckpointFolder, TrainingRun


class OneNumber(nn.Module):
    """A model that shows which save it came from."""

    def __init__(self, value: float = -1.0, num_elements: int = 1) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.full((num_elements,), value))


def run_of(value: float, num_elements: int = 1) -> TrainingRun:
    return TrainingRun(model=OneNumber(value, num_elements))


def loaded(path: Path | str, step: int | None = None) -> float:
    run = run_of(-1.0)
    assert CheckpointFolder(path).load(run, step) is not None
    return run.model.number.item()


def names(path: Path) -> list[str]:
    """All but the file that names the process which saves there."""
    return sorted(entry.name for entry in path.iterdir() if entry.name != "writer.json")


class Folder(RuleBasedStateMachine):
    """Saves of any steps, whole and broken off, against a dict of what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://checkpoints-{id(self)}"
        self.keep = 2
        self.expected: dict[int, float] = {}
        self.count = 0.0

    @rule(step=st.integers(0, 6), wait=st.booleans())
    def save(self, step: int, wait: bool) -> None:
        self.count += 1
        folder = CheckpointFolder(self.url, keep=self.keep)
        folder.save(step, run_of(self.count), wait=wait)
        folder.wait()
        self.expected[step] = self.count
        kept = {*sorted(self.expected)[-self.keep :], step}
        self.expected = {step: value for step, value in self.expected.items() if step in kept}

    @rule(keep=st.integers(1, 3))
    def keep_more_or_less(self, keep: int) -> None:
        self.keep = keep

    @rule(step=st.integers(0, 6))
    def break_off(self, step: int) -> None:
        files = fsspec.filesystem("memory")
        path = f"{self.url}/step-{step:09d}-99"
        if not files.exists(path):
            files.pipe(f"{path}/__0_0.distcp", b"half")

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def load_a_step(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.expected)))
        assert loaded(self.url, step) == self.expected[step]

    @invariant()
    def the_newest_is_found(self) -> None:
        assert CheckpointFolder(self.url).steps() == sorted(self.expected)
        if self.expected:
            assert loaded(self.url) == self.expected[max(self.expected)]

    def teardown(self) -> None:
        files = fsspec.filesystem("memory")
        if files.exists(self.url):
            files.rm(self.url, recursive=True)


TestFolder = Folder.TestCase
TestFolder.settings = settings(max_examples=25, stateful_step_count=8)


def test_what_stands_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "some" / "checkpoints"
    folder = CheckpointFolder(path)
    assert folder.steps() == []
    assert folder.load(run_of(0.0)) is None
    for step in (5, 10, 15):
        folder.save(step, run_of(float(step)))
    assert names(path) == ["step-000000010", "step-000000015"]
    assert names(path / "step-000000015") == [".metadata", "__0_0.distcp", "complete.json"]
    folder.save(15, run_of(1.0))
    assert names(path) == ["step-000000010", "step-000000015-1"]
    assert (loaded(path), loaded(path, 10)) == (1.0, 10.0)


def test_what_others_keep_there_stays(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-by-step", "step-7x"):
        (tmp_path / name).mkdir()
    for step in range(4):
        CheckpointFolder(tmp_path, keep=1).save(step, run_of(0.0))
    assert names(tmp_path) == ["notes.txt", "step-000000003", "step-7x", "step-by-step"]


class Intruder:
    """While it is pickled, another run saves in the folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[type, tuple[str]]:
        CheckpointFolder(self.path).save(2, run_of(7.0))
        return Intruder, (self.path,)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_run_that_another_one_disturbs_spoils_nothing(is_local: bool, tmp_path: Path) -> None:
    path = str(tmp_path) if is_local else f"memory://{tmp_path.name}"

    class Disturbed(OneNumber):
        def get_extra_state(self) -> Intruder:
            return Intruder(path)

    run = TrainingRun(model=Disturbed(1.0))
    with pytest.raises(
        FileNotFoundError if is_local else RuntimeError,
        match=r"step-000000002/\.metadata" if is_local else "one run at a time may save in memory",
    ):
        CheckpointFolder(path).save(2, run)
    assert CheckpointFolder(path).steps() == [2]
    assert loaded(path) == 7.0


def test_no_checkpoint_of_a_step_is_named(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save(4, run_of(0.0))
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint of step 3; .* steps \[4\]"
    ):
        CheckpointFolder(tmp_path).load(run_of(0.0), 3)


def damaged(path: Path, damage: str) -> str:
    """Damage a checkpoint; what the error says."""
    file = path / "__0_0.distcp"
    whole = bytearray(file.read_bytes())
    if damage in ("marker", "empty marker"):
        (path / "complete.json").write_text("{" if damage == "marker" else "{}")
        return r"ValueError: file .*complete\.json is corrupt: load an earlier step"
    if damage == "missing":
        file.unlink()
        return r"FileNotFoundError: .*step-000000002 lacks its file __0_0\.distcp"
    if damage == "metadata":
        (path / ".metadata").write_bytes(b"")
        return (
            r"ValueError: file .*\.metadata must have \d+ bytes .* got 0 and 00000000; it is corr"
        )
    if damage == "cut off":
        file.write_bytes(whole[:-1])
        return rf"must have {len(whole)} bytes .*, got {len(whole) - 1} and"
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    return rf"ValueError: .* {len(whole)} bytes and CRC-32 \w+ as it was written, got {len(whole)}"


@pytest.mark.parametrize(
    "damage", ["marker", "empty marker", "missing", "metadata", "cut off", "one bit"]
)
def test_damage_is_named_and_nothing_is_changed(damage: str, tmp_path: Path) -> None:
    for step in (1, 2):
        CheckpointFolder(tmp_path).save(step, run_of(float(step)))
    message = damaged(tmp_path / "step-000000002", damage)
    run = run_of(-1.0)
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        CheckpointFolder(tmp_path).load(run)
    described = f"{error.type.__name__}: {error.value}"
    assert re.search(message, described), described
    assert run.model.number.item() == -1.0
    assert loaded(tmp_path, 1) == 1.0


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"keep must be an int, got 1\.5"):
        CheckpointFolder(tmp_path, keep=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointFolder(tmp_path, keep=0)
    with pytest.raises(TypeError, match=r"step must be an int, got 1\.5"):
        CheckpointFolder(tmp_path).save(1.5, run_of(0.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        CheckpointFolder(tmp_path).save(-1, run_of(0.0))
    with pytest.raises(ValueError, match=r"path must be .* that fsspec knows, got 'nowhere://x'"):
        CheckpointFolder("nowhere://x")
    with pytest.raises(ImportError, match=r"path 'dropbox://x' needs a package .*: "):
        CheckpointFolder("dropbox://x")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file must be a folder, and is a file"):
        CheckpointFolder(tmp_path / "file").load(run_of(0.0))
    with pytest.raises(NotADirectoryError):
        CheckpointFolder(tmp_path / "file").save(1, run_of(0.0))
    with pytest.raises(NotADirectoryError):
        CheckpointFolder(tmp_path / "file" / "below").save(1, run_of(0.0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs permission to mount a disk: {error}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_the_last_checkpoint(wait: bool, small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk / "checkpoints", keep=1)
    folder.save(1, run_of(1.0))

    def save_too_much() -> None:
        folder.save(2, run_of(2.0, 100_000), wait=wait)
        folder.wait()

    with pytest.raises(OSError, match="No space left on device"):
        save_too_much()
    assert folder.steps() == [1]
    assert loaded(small_disk / "checkpoints") == 1.0
    folder.save(3, run_of(3.0))
    assert names(small_disk / "checkpoints") == ["step-000000003"]
    folder.close()  # or the disk is in use


def test_an_asynchronous_failure_is_raised_by_the_next_call_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for later in ("save", "load", "wait"):
        folder = CheckpointFolder(tmp_path / "file")
        folder.save(1, run_of(0.0), wait=False)
        with pytest.raises(NotADirectoryError):
            {
                "save": lambda: folder.save(2, run_of(0.0), wait=False),  # noqa: B023
                "load": lambda: folder.load(run_of(0.0)),  # noqa: B023
                "wait": folder.wait,
            }[later]()
        folder.wait()


def test_a_failure_that_nobody_asked_for_is_shown_at_the_end(tmp_path: Path) -> None:
    program = """
import sys, torch
from torchembed.training import CheckpointFolder, TrainingRun
folders = [CheckpointFolder(path) for path in sys.argv[1:]]
for folder in folders:
    folder.save(1, TrainingRun(model=torch.nn.Linear(2, 2)), wait=False)
"""
    (tmp_path / "file").touch()
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file"), str(tmp_path / "folder")],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    # Once, and nothing of the folder that is as it should be.
    assert re.findall(r"^(\w*Error)\b", run.stderr, re.MULTILINE) == ["NotADirectoryError"]
    assert CheckpointFolder(tmp_path / "folder").steps() == [1]
