"""The file that makes a checkpoint complete: no bit of it may change unnoticed."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from torchembed.checkpoints.files.storage import FileDigest
from torchembed.checkpoints.marker import Marker
from torchembed.training import CheckpointFolder, TrainingRun

MARKER = Marker(
    step=3,
    num_ranks=2,
    files={".metadata": FileDigest(17, 0xABCDEF01), "__0_0.distcp": FileDigest(2**40, 0)},
)


def test_a_marker_is_read_as_it_was_written() -> None:
    assert Marker.parse(MARKER.to_bytes()) == MARKER
    assert json.loads(MARKER.to_bytes())["num_ranks"] == 2


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    whole = MARKER.to_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    for number in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[number // 8] ^= 1 << number % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        with pytest.raises(ValueError, match="marker"):
            Marker.parse(content)


def test_a_marker_of_earlier_releases_has_no_checksum() -> None:
    fields = {"step": 3, "num_ranks": 2, "files": {k: list(v) for k, v in MARKER.files.items()}}
    assert Marker.parse(json.dumps(fields).encode()) == MARKER


def test_a_checkpoint_of_an_earlier_release_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    CheckpointFolder(tmp_path).save(1, TrainingRun(model=model))
    expected = model.weight.detach().clone()
    file = tmp_path / "step-000000001" / "complete.json"
    fields = json.loads(file.read_bytes())
    assert fields.pop("crc32")
    file.write_text(json.dumps(fields))
    nn.init.zeros_(model.weight)
    assert CheckpointFolder(tmp_path).load(TrainingRun(model=model)) == 1
    assert torch.equal(model.weight, expected)


def test_another_number_of_ranks_is_damage(tmp_path: Path) -> None:
    run = TrainingRun(model=nn.Linear(2, 2))
    CheckpointFolder(tmp_path).save(1, run)
    file = tmp_path / "step-000000001" / "complete.json"
    content = file.read_text()
    assert '"num_ranks": 1' in content
    file.write_text(content.replace('"num_ranks": 1', '"num_ranks": 3'))
    with pytest.raises(ValueError, match=r"complete\.json is corrupt: load an earlier step"):
        CheckpointFolder(tmp_path).load(run)
