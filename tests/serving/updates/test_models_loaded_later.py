"""Updates of models and versions that are not loaded wait with the brokers until these are."""

import logging
from pathlib import Path

import pytest
import torch

from tests.support.asked_servers import trained
from tests.support.kafka_brokers import running_brokers
from tests.support.served_lookups import options_over
from tests.support.waiting import wait_until
from torchembed.serving.models import ModelRepository, deploy
from torchembed.serving.updates import ApplierOptions, DropReason, UpdateApplier
from torchembed.stores import MemoryStore
from torchembed.streams import SourceOptions, UpdatePublisher, UpdateSource

KEYS, DIM = torch.arange(5), 8


def rows_of(repository: ModelRepository, model: str, table: str = "t0") -> set[float]:
    levels = repository.lookups()[f"{model}/{table}"].levels
    assert levels is not None
    lines = levels.read(f"{model}/{table}", KEYS).lines
    return set(lines.view(torch.float32).flatten().tolist())


def test_they_are_applied_once_their_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = trained(1)
    for model, version in (("m", 1), ("n", 1)):
        deploy(case.model, tmp_path, name=model, version=version, examples=case.examples(4))
    options = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0)
    with (
        running_brokers() as brokers,
        UpdatePublisher(brokers.addresses) as publisher,
        MemoryStore() as store,
        ModelRepository(tmp_path, options_over(store)) as repository,
    ):

        def publish(model: str, version: int) -> None:
            rows = torch.full((len(KEYS), DIM), float(version))
            publisher.publish_rows(model, "t0", KEYS, rows, version=version)
            publisher.flush(120.0)

        def wait_for(model: str, version: int) -> None:
            wait_until(
                lambda: rows_of(repository, model) == {float(version)},
                lambda: repr((source.statistics, applier.statistics())),
            )

        for model in "mn":
            brokers.make_topic(f"torchembed.{model}.t0", 1)
        repository.load("n")
        source = UpdateSource(brokers.addresses, "g", options, is_served=repository.is_served)
        applying = ApplierOptions(poll_timeout_seconds=0.05)
        with UpdateApplier(source, repository, applying, records=store) as applier:
            publish("m", 2)
            publish("n", 2)
            wait_for("n", 2)
            assert source.topics == {"torchembed.n.t0"}
            repository.load("m")
            wait_for("m", 2)
            # Unloaded while it is followed: what comes meanwhile waits as well.
            repository.unload("m")
            publish("m", 3)
            publish("n", 3)
            wait_for("n", 3)
            wait_until(lambda: source.topics == {"torchembed.n.t0"})
            publish("m", 4)
            repository.load("m")
            wait_for("m", 4)
            # Lookups see rows a moment before they are counted.
            wait_until(lambda: applier.statistics().tables["m", "t0"].version == 4)
            assert dict(applier.statistics().num_dropped).get(DropReason.UNKNOWN, 0) == 0
            # A later version was deployed than trainers count.
            deploy(case.model, tmp_path, name="n", version=9, examples=case.examples(4))
            repository.load("n")
            before = rows_of(repository, "n")
            with caplog.at_level(logging.WARNING, "torchembed.serving"):
                publish("n", 5)
                wait_until(
                    lambda: applier.statistics().num_dropped.get(DropReason.OLD_VERSION, 0) == 1
                )
            assert "must be of version 9, which was deployed, or later, got version 5" in (
                caplog.text
            )
            assert rows_of(repository, "n") == before
            publish("n", 9)
            wait_for("n", 9)


def test_those_of_a_version_wait_where_each_has_rows_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = trained(1)

    def deploy_version(version: int) -> None:
        deploy(case.model, tmp_path, name="m", version=version, examples=case.examples(4))

    deploy_version(2)
    options = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0)
    with (
        running_brokers() as brokers,
        UpdatePublisher(brokers.addresses) as publisher,
        MemoryStore() as store,
        ModelRepository(
            tmp_path, options_over(store, rows_by_version=True, num_latest_versions=2)
        ) as repository,
    ):

        def publish(version: int, number: float) -> None:
            rows = torch.full((len(KEYS), DIM), number)
            publisher.publish_rows("m", "t0", KEYS, rows, version=version)
            publisher.flush(120.0)

        def wait_for(version: int, number: float) -> None:
            wait_until(
                lambda: rows_of(repository, "m", f"t0@{version}") == {number},
                lambda: repr((source.statistics, applier.statistics())),
            )

        brokers.make_topic("torchembed.m.t0", 1)
        repository.load("m")
        source = UpdateSource(brokers.addresses, "g", options, is_served=repository.is_served)
        applying = ApplierOptions(poll_timeout_seconds=0.05)
        with UpdateApplier(source, repository, applying, records=store) as applier:
            publish(1, 1.0)
            publish(2, 2.0)
            wait_for(2, 2.0)
            dropped = applier.statistics().num_dropped
            assert dropped == {DropReason.UNKNOWN: 1}
            with caplog.at_level(logging.WARNING, "torchembed.streams"):
                publish(3, 3.0)
                publish(3, 3.5)
                wait_until(lambda: source.topics == frozenset())
            assert "updates of torchembed.m.t0 wait with the brokers until version 3" in caplog.text
            assert rows_of(repository, "m", "t0@2") == {2.0}
            deploy_version(3)
            repository.load("m")
            wait_for(3, 3.5)
            assert rows_of(repository, "m", "t0@2") == {2.0}
            # A version that is left out: its updates wait no longer once a later one is loaded.
            publish(4, 4.0)
            wait_until(lambda: source.topics == frozenset())
            publish(5, 5.0)
            deploy_version(5)
            repository.load("m")
            wait_for(5, 5.0)
            assert applier.statistics().num_dropped == {DropReason.UNKNOWN: 2}
