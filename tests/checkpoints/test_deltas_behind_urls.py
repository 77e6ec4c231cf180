"""Numbered exports in fsspec's memory and in a server that speaks S3, written and followed."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchembed
from tests.support.dynamic_tables import train_on, two_and_a_static_one
from tests.support.object_stores import download, folder_of_url
from tests.support.tolerance import assert_same_bits
from torchembed import Dynamic
from torchembed.checkpoints import DeltaFolder, load_deltas


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with folder_of_url(request.param) as found:
        yield found


class Trained:
    """Dynamic tables a and b, a static table c and a dense layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tables = two_and_a_static_one(4, Dynamic(deletion_log=50))
        self.model = nn.ModuleDict({"tables": self.tables, "over": nn.Linear(2, 1)})
        self.optimizer = torchembed.optim.Adagrad(self.tables.parameters(), lr=0.5)

    def step(self, *ids: int) -> None:
        train_on(self.tables, self.optimizer, list(ids), list(ids))
        with torch.no_grad():
            self.model["over"].weight += 1.0  # type: ignore[union-attr,operator]

    def check_same(self, other: "Trained") -> None:
        ours, theirs = (trained.tables.delta().tables for trained in (self, other))
        for name, of_table in theirs.items():
            order, own_order = of_table.ids.argsort(), ours[name].ids.argsort()
            assert_same_bits(ours[name].ids[own_order], of_table.ids[order])
            assert_same_bits(ours[name].rows[own_order], of_table.rows[order])
        for name in ("tables.embedding_bags.c.weight", "over.weight"):
            assert_same_bits(*(t.model.state_dict()[name] for t in (self, other)))


def test_exports_are_written_followed_and_replaced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, follower, folder, at = Trained(), Trained(), DeltaFolder(url), None
    with pytest.raises(FileNotFoundError, match=rf"hold exports of a model, and {url} holds none"):
        load_deltas(follower.model, url)
    for number, ids in enumerate(([1, 2], [2, 3], [9])):
        trained.step(*ids)
        if number == 2:
            # One that fails is none, and the next one goes on from that before.
            with monkeypatch.context() as patch:
                patch.setattr("torchembed.checkpoints.exports.delta_folder.bytes_of", _fail)
                with pytest.raises(OSError, match="no such row"):
                    folder.export(trained.model, number)
            assert folder.numbers() == [0, 1]
            assert load_deltas(follower.model, url, after=1) == (1, 0)
        assert folder.export(trained.model, number) == (number == 0)
        at, num_left_out = load_deltas(follower.model, url, after=at)
        assert (at, num_left_out) == (number, 0)
        follower.check_same(trained)
    assert folder.numbers() == [0, 1, 2]
    new = Trained()
    assert load_deltas(new.model, url) == (2, 0)
    new.check_same(trained)
    assert not any("partial" in name for name in download(url))

    # A run that goes on from before export 1 replaces it and those behind it.
    other = Trained()
    other.step(7)
    assert DeltaFolder(url).export(other.model, 1)
    assert folder.numbers() == [0, 1]
    load_deltas(new.model, url)
    new.check_same(other)


def _fail(*_: object) -> memoryview:
    raise OSError("no such row")


def test_damaged_exports_are_named() -> None:
    with folder_of_url("memory") as url:
        trained = Trained()
        trained.step(1)
        DeltaFolder(url).export(trained.model, 0)
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url)
        files.pipe_file(f"{root}/000000/delta.json", b"{}")
        with pytest.raises(ValueError, match=r"000000/delta\.json is corrupt: export again"):
            load_deltas(trained.model, url)
