"""A server whose disk is full while updates of its rows come."""

import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support import full_disks, store_processes
from tests.support.kafka_brokers import running_brokers
from tests.support.waiting import wait_until
from torchembed.serving.models import deploy
from torchembed.training import ModelPublisher

pytest.importorskip("tritonclient.http")
pytest.importorskip("rocksdict")
confluent_kafka = pytest.importorskip("confluent_kafka")

DIM, NUM_ROWS, NUM_CACHED = 16, 5000, 50
TOPIC = "torchembed.m.items"


class Rows(nn.Module):
    """Gives rows back, which are ``version`` in all columns."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.items = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            self.items.weight.fill_(float(version))

    def forward(self, ids: Tensor) -> Tensor:
        return self.items(ids) * self.scale


def versions(http: str) -> set[float]:
    """The versions of all rows, none of which may be a default."""
    import tritonclient.http

    client = tritonclient.http.InferenceServerClient(http)
    tensor = tritonclient.http.InferInput("ids", [NUM_ROWS, 1], "INT64")
    tensor.set_data_from_numpy(np.arange(NUM_ROWS)[:, None])
    found = client.infer("m", [tensor])
    client.close()
    rows, num_defaults = found.as_numpy("output"), found.as_numpy("default_rows")
    assert rows is not None and num_defaults is not None and not num_defaults.any()
    return set(rows.ravel().tolist())


def metric(http: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


def committed(brokers: str) -> list[int]:
    """How far the server has committed each partition of the table's topic, 0 where nowhere."""
    reader = confluent_kafka.Consumer(
        {"bootstrap.servers": brokers, "group.id": full_disks.GROUP, "log_level": 0}
    )
    partitions = reader.list_topics(TOPIC, timeout=60).topics[TOPIC].partitions
    asked = [confluent_kafka.TopicPartition(TOPIC, number) for number in sorted(partitions)]
    offsets = [found.offset for found in reader.committed(asked, timeout=60)]
    reader.close()
    return [max(offset, 0) for offset in offsets]


def test_updates_wait_for_room_on_the_disk_while_answers_go_on(tmp_path: Path) -> None:
    models, disk, log = tmp_path / "models", tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    deploy(Rows(1), models, name="m", version=1, examples=torch.zeros(3, 1, dtype=torch.int64))
    with (
        running_brokers() as brokers,
        ModelPublisher(Rows(2), "m", brokers.addresses) as publisher,
    ):
        brokers.make_topic(TOPIC, 2)
        brokers.make_topic("torchembed-dense.m", 1)
        arguments = models, disk, log, brokers.addresses, NUM_CACHED
        server = store_processes.start(full_disks.serve_on_a_disk, *arguments)
        http = server.next_message()
        if http is None:
            pytest.skip("needs a disk of its own, which this machine does not let tests mount")

        def ask_for(command: str) -> str:
            server.messages.send(command)
            return server.next_message()

        ask_for("fill")
        publisher.publish(2, whole=True)
        publisher.flush()
        wait_until(lambda: metric(http, "torchembed_update_retries_total") >= 2, log.read_text)
        # Of most rows neither the cache nor another level has a copy.
        for _ in range(5):
            assert versions(http) == {1.0}
        num_retries = metric(http, "torchembed_update_retries_total")
        wait_until(lambda: metric(http, "torchembed_update_retries_total") > num_retries)
        assert versions(http) == {1.0}
        assert metric(http, "torchembed_updates_total") == 0
        assert metric(http, "torchembed_level_away") == 0
        assert committed(brokers.addresses) == [0, 0]
        (line,) = re.findall("updates wait, and are tried again: .*", log.read_text())
        assert "No space left on device: make room there, and the next write is done" in line
        ask_for("empty")
        wait_until(lambda: versions(http) == {2.0}, log.read_text)

        def is_committed() -> bool:
            num_applied = metric(http, "torchembed_updates_total")
            offsets = committed(brokers.addresses)
            return all(offsets) and num_applied == sum(offsets)

        wait_until(is_committed, log.read_text)
        assert log.read_text().count("updates are applied again") == 1
        assert ask_for("end") == "ended"
        server.process.join(store_processes.LIMIT_SECONDS)
        assert server.process.exitcode == 0
