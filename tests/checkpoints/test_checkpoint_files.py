"""Several files at once, and no memory beside the state."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import torchembed
from torchembed.checkpoints.files import save_planner
from torchembed.checkpoints.files.in_threads import NUM_THREADS, in_threads
from torchembed.training import CheckpointFolder, TrainingRun

NUM_TABLES = 32
TABLE_BYTES = 1 << 22
SLACK_BYTES = 1 << 25


def resident_bytes(name: str) -> int:
    """Memory of this process: ``VmRSS``, or its peak since :func:`forget_peak`, ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if name in line) * 1024


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"needs Linux to measure the peak of memory: {error}")


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_needs_no_memory_beside_the_state(wait: bool, tmp_path: Path) -> None:
    """And an asynchronous one as much as the state has."""
    tables = torchembed.EmbeddingBagCollection(
        [
            torchembed.EmbeddingBagConfig(
                name=str(number),
                num_embeddings=TABLE_BYTES // 128,
                embedding_dim=32,
                feature_names=(str(number),),
            )
            for number in range(NUM_TABLES)
        ]
    )
    tables.register_buffer("across", torch.zeros(1024, 1024).t())
    run, folder = TrainingRun(model=tables), CheckpointFolder(tmp_path)
    folder.save(0, run)
    forget_peak()
    before = resident_bytes("VmRSS")
    folder.save(1, run, wait=wait)
    folder.wait()
    allowed = SLACK_BYTES + (0 if wait else NUM_TABLES * TABLE_BYTES)
    assert resident_bytes("VmHWM") - before < allowed


def test_a_rank_writes_several_files_of_about_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_planner, "CHUNK_BYTES", 4000)
    model = nn.Module()
    for number, size in enumerate((9000, 1000, 100, 0, 3000)):
        model.register_buffer(f"b{number}", torch.arange(float(size)))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    run = TrainingRun(model=model)
    CheckpointFolder(tmp_path).save(1, run)
    files = sorted((tmp_path / "step-000000001").glob("*.distcp"))
    assert [file.name for file in files] == [f"__0_{number}.distcp" for number in range(4)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.5 * min(sizes)
    for value in model.buffers():
        value.fill_(-1.0)
    CheckpointFolder(tmp_path).load(run)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_threads_work_at_once_and_pass_their_errors_on() -> None:
    everyone_is_here = threading.Barrier(NUM_THREADS)
    seen: list[int] = []

    def meet(number: int) -> None:
        everyone_is_here.wait(timeout=60)
        seen.append(number)

    in_threads(meet, range(2 * NUM_THREADS))
    assert sorted(seen) == list(range(2 * NUM_THREADS))
    in_threads(meet, ())

    def fail(number: int) -> None:
        raise OSError(f"number {number}")

    with pytest.raises(OSError, match=r"number \d"):
        in_threads(fail, range(3))
