"""Models that are published while they are trained: lookups that follow give the trainer's rows."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchembed
from tests.support import sharded_cases
from tests.support.dynamic_tables import one_bag_each, train_on, two_and_a_static_one
from tests.support.followed_models import FollowedModels, followed_models
from tests.support.kafka_brokers import Brokers, running_brokers
from tests.support.ranks import run_on_ranks
from torchembed import Dynamic, EmbeddingBagCollection
from torchembed.checkpoints import model_rows
from torchembed.modules.served_names import dense_tensors, table_names
from torchembed.serving.updates import ApplierOptions, DropReason, UpdateApplier
from torchembed.streams import (
    DeliveryError,
    PublisherOptions,
    SourceOptions,
    UpdatePublisher,
    UpdateSource,
)
from torchembed.training import ModelPublisher

LIMIT_SECONDS = 120.0
IDS = range(-2, 40)
DIMS = {"m/a": 2, "m/b": 2, "m/c": 2}


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    with running_brokers() as brokers:
        for topic in ("torchembed.m.a", "torchembed.m.b", "torchembed.m.c"):
            brokers.make_topic(topic, 2)
        brokers.make_topic("torchembed-dense.m", 1)
        yield brokers


class Model(nn.Module):
    """Dynamic tables a and b, the static table c, a dense layer and a buffer."""

    def __init__(self, capacity: int = 6, **policies: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables: EmbeddingBagCollection = two_and_a_static_one(
            capacity, Dynamic(**{"deletion_log": 50, **policies})
        )
        self.over = nn.Linear(6, 1)
        self.register_buffer("num_steps", torch.zeros(()))

    def step(self, optimizer: torch.optim.Optimizer, a: list[int], b: list[int]) -> None:
        train_on(self.tables, optimizer, a, b)
        optimizer.zero_grad()
        with torch.no_grad():
            self.over.weight += self.tables(one_bag_each(a[:1], b[:1])).values().mean()
            self.num_steps += 1


def dynamic_optimizer(model: Model) -> torch.optim.Optimizer:
    """An optimizer that leaves the static table as it is."""
    weights = [p for n, p in model.tables.named_parameters() if ".c." not in n]
    return torchembed.optim.Adagrad(weights, lr=0.5)


def rows_of(model: Model) -> dict[str, dict[int, Tensor]]:
    """The rows by id of each table."""
    of_tables = model.tables.delta().tables
    found = {f"m/{n}": dict(zip(t.ids.tolist(), t.rows, strict=True)) for n, t in of_tables.items()}
    static = model.tables.embedding_bags["c"].weight.detach()
    return {**found, "m/c": dict(enumerate(static.clone()))}


class Following:
    """Lookups that follow a model."""

    def __init__(self, applier: UpdateApplier, models: FollowedModels) -> None:
        self.applier, self.models = applier, models

    def assert_follow(self, model: Model) -> None:
        """Fail unless lookups and the dense part are soon as the model is."""
        self.assert_become(rows_of(model))
        expected = {name: tensor.tolist() for name, tensor in dense_tensors(model).items()}
        self.until(self._dense, expected)

    def assert_become(self, rows: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Fail unless lookups soon give these rows by table and id, and no others."""
        self.until(
            lambda: {table: as_lists(self.models.rows_of(table, IDS)) for table in rows},
            {table: as_lists(of_table) for table, of_table in rows.items()},
        )

    def _dense(self) -> dict[str, object]:
        _, tensors = self.models.dense.get("m", (0, {}))
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    def until(self, found: Callable[[], object], expected: object) -> None:
        """Fail unless it is soon ``expected``."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (now := found()) != expected:
            told = (self.applier.source.statistics, self.applier.statistics())
            assert time.monotonic() < deadline and now != expected, (now, expected, told)
            time.sleep(0.01)


def as_lists(rows: Mapping[int, Tensor]) -> dict[int, list[float]]:
    return {id_: row.tolist() for id_, row in rows.items()}


@pytest.fixture
def following(brokers: Brokers) -> Iterator[Following]:
    options = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0)
    source = UpdateSource(brokers.addresses, "g", options)
    with (
        followed_models(DIMS) as models,
        UpdateApplier(source, models, ApplierOptions(poll_timeout_seconds=0.05)) as applier,
    ):
        yield Following(applier, models)


@pytest.mark.parametrize("log", [50, 3])
def test_lookups_that_follow_have_the_trainers_rows(
    brokers: Brokers, following: Following, log: int
) -> None:
    """With ids that are evicted and come again, also more of them than the log holds: then servers
    are told of the difference."""
    random_numbers = random.Random(log)
    model = Model(deletion_log=log)
    optimizer = dynamic_optimizer(model)
    wholes = []
    with ModelPublisher(model, "m", brokers.addresses) as publisher:
        for version in range(1, 9):
            for _ in range(random_numbers.choice([0, 1, 6])):
                a, b = random_numbers.sample(IDS, 4), random_numbers.sample(IDS, 2)
                model.step(optimizer, a, b)
            with torch.no_grad():
                model.tables.embedding_bags["c"].weight[0] += 1
            published = publisher.publish(version, whole=version % 4 == 0)
            wholes.append(published.is_whole)
            publisher.flush()
            if published.is_whole:
                following.assert_follow(model)
    following.assert_follow(model)
    assert wholes[0] and wholes[3] and wholes[7]
    assert sum(wholes) == 3 if log == 50 else sum(wholes) > 3


def test_a_call_publishes_what_changed(brokers: Brokers, following: Following) -> None:
    model = Model()
    optimizer = dynamic_optimizer(model)
    model.step(optimizer, [1, 2], [3])
    with ModelPublisher(model, "m", brokers.addresses) as publisher:
        assert publisher.publish(1) == (True, 2 + 1 + 6, 0)
        assert publisher.publish(1) == (False, 0, 0)
        model.step(optimizer, [2], [4])
        assert publisher.publish(2) == (False, 2, 0)
        model.step(optimizer, [5, 6, 7, 8, 9], [4])
        whole = publisher.publish(3)
        assert whole.num_deletions > 0 and not whole.is_whole
        with pytest.raises(ValueError, match=r"version must be at least 3, as published .* got 2"):
            publisher.publish(2)
    following.assert_follow(model)


def test_a_model_that_was_just_deployed_publishes_changes_alone(
    brokers: Brokers, following: Following
) -> None:
    model = Model(deletion_log=2)
    optimizer = dynamic_optimizer(model)
    model.step(optimizer, [1, 2], [3])
    for table, rows in rows_of(model).items():
        keys, values = torch.tensor(list(rows)), torch.stack(list(rows.values()))
        following.models.lookup.apply_rows(table, keys, values)
    with ModelPublisher(model, "m", brokers.addresses, is_deployed=True) as publisher:
        model.step(optimizer, [2], [4])
        assert publisher.publish(1) == (False, 2, 0)
        publisher.flush()
        following.assert_follow(model)
        # Ids that were deployed are gone, and the log does not say which.
        for first in range(5, 35, 5):
            model.step(optimizer, list(range(first, first + 5)), [16])
        found = publisher.publish(2)
        assert found.is_whole and found.num_deletions > 0
    following.assert_follow(model)


def test_a_call_behind_a_refusal_is_whole(brokers: Brokers, following: Following) -> None:
    """Also of deletions: servers learn of ids that left by then."""
    model = Model()
    optimizer = dynamic_optimizer(model)
    model.step(optimizer, [1, 2, 3], [4])
    too_large = 10
    # Nothing is sent before a call waits for it, so that the call behind learns of refusals.
    options = PublisherOptions(linger_seconds=5 * LIMIT_SECONDS)
    with (
        UpdatePublisher(brokers.addresses, options) as updates,
        ModelPublisher(model, "m", updates) as publisher,
    ):
        publisher.publish(1)
        publisher.flush()
        for first in range(5, 35, 5):
            model.step(optimizer, list(range(first, first + 5)), [16])
        brokers.refuse_next_messages(*[too_large] * 3)
        assert not publisher.publish(2).is_whole
        with pytest.raises(DeliveryError, match=r"refused \d for good"):
            publisher.publish(3)
        found = publisher.publish(3)
        assert found.is_whole and found.num_deletions > 0
        publisher.flush()
        following.assert_follow(model)
        model.step(optimizer, [2], [4])
        assert not publisher.publish(4).is_whole
    following.assert_follow(model)


def test_a_call_that_found_brokers_away_loses_nothing(
    brokers: Brokers, following: Following
) -> None:
    model = Model()
    optimizer = dynamic_optimizer(model)
    with ModelPublisher(model, "m", brokers.addresses, flush_timeout_seconds=0.3) as publisher:
        model.step(optimizer, [1, 2, 3], [4])
        publisher.publish(1)
        publisher.flush(LIMIT_SECONDS)
        brokers.go_away()
        model.step(optimizer, [11, 12, 13, 14, 15], [16])
        publisher.publish(2)
        model.step(optimizer, [21], [22])
        with pytest.raises(TimeoutError, match=r"must take all messages within 0.3 s, and \d are"):
            publisher.publish(3)
        brokers.come_back()
        publisher.flush(LIMIT_SECONDS)
        publisher.publish(3)
        publisher.flush(LIMIT_SECONDS)
    following.assert_follow(model)


def test_a_trainer_that_begins_anew_goes_on(brokers: Brokers, following: Following) -> None:
    """From a checkpoint, under greater versions; what it says under lesser ones is dropped."""
    model = Model()
    optimizer = dynamic_optimizer(model)
    for first in (1, 6):
        with ModelPublisher(model, "m", brokers.addresses) as publisher:
            for version in range(first, first + 3):
                model.step(optimizer, [version], [version])
                publisher.publish(version)
    following.assert_follow(model)
    with ModelPublisher(model, "m", brokers.addresses) as publisher:
        publisher.publish(3)
        publisher.publish(9)
    following.assert_follow(model)
    following.until(lambda: following.applier.statistics().dense_versions, {"m": 9})
    assert following.applier.statistics().num_dropped[DropReason.OLD_VERSION] > 0


def publish_on_ranks(addresses: str) -> dict[str, dict[int, list[float]]]:
    """Train and publish on this rank; the rows that it has in the end."""
    model, rank = Model(64), dist.get_rank()
    placements = {"a": "row_wise", "b": "table_wise", "c": "row_wise"}
    named = {f"tables.embedding_bags.{name}": value for name, value in placements.items()}
    torchembed.shard_embeddings(model, sharded_cases.made_mesh("cpu", 1), named)
    optimizer = dynamic_optimizer(model)
    with ModelPublisher(model, "m", addresses) as publisher:
        for version in range(1, 4):
            ids = [9 * version + 3 * rank, version, 7]
            train_on(model.tables, optimizer, ids, [*ids, 30 + version])
            optimizer.zero_grad()
            gone = torch.tensor([9 * version - 9, version - 1])
            model.tables.erase(gone, table="b")
            assert publisher.publish(version).is_whole == (version == 1)
    found = {}
    for name in ("a", "b", "c"):
        chunks = model_rows(model, f"tables.embedding_bags.{name}.weight", with_states=False)
        found[f"m/{name}"] = {
            id_: row
            for chunk in chunks
            for id_, row in zip(chunk.keys.tolist(), chunk.rows.tolist(), strict=True)
        }
    return found


def test_ranks_publish_their_own_rows(brokers: Brokers, following: Following) -> None:
    of_ranks = run_on_ranks(2, publish_on_ranks, brokers.addresses)
    expected: dict[str, dict[int, Tensor]] = {}
    for of_rank in of_ranks:
        for table, rows in of_rank.items():
            of_table = expected.setdefault(table, {})
            assert not of_table.keys() & rows.keys()
            of_table |= {id_: torch.tensor(row) for id_, row in rows.items() if id_ in IDS}
    assert all(len(rows) > 5 for rows in expected.values())
    following.assert_become(expected)
    assert following.applier.statistics().num_dropped == {}


def test_names_are_those_of_the_deployed_model() -> None:
    model = Model()
    assert table_names(model) == {
        f"tables.embedding_bags.{name}.weight": name for name in ("a", "b", "c")
    }
    assert list(dense_tensors(model)) == ["over.weight", "over.bias", "num_steps"]


def test_publishers_may_be_shared_and_stay_open(brokers: Brokers) -> None:
    options = PublisherOptions(max_message_bytes=4096)
    with UpdatePublisher(brokers.addresses, options) as shared:
        with ModelPublisher(Model(), "m", shared) as publisher:
            publisher.publish(1)
        shared.flush(LIMIT_SECONDS)
        assert shared.statistics.num_refused_messages == 0
    with pytest.raises(ValueError, match="keeps no log of the ids that leave it"):
        ModelPublisher(Model(deletion_log=0), "m", shared, is_deployed=True)
