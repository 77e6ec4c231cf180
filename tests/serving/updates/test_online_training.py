"""A model that is trained on after it was deployed: its server's answers follow its forward."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.kafka_brokers import running_brokers
from tests.support.served_lookups import options_over
from tests.zoo.served_models import bags, feature_arrays, fixed
from torchembed import Dynamic
from torchembed.models import DLRM
from torchembed.serving.models import ModelRepository, deploy
from torchembed.serving.updates import ApplierOptions, DropReason, UpdateApplier
from torchembed.stores import MemoryStore
from torchembed.streams import SourceOptions, UpdateSource
from torchembed.training import ModelPublisher

LIMIT_SECONDS = 120.0
HOTNESS = (1, 1, 1)
LAST_VERSION = 7


def examples(num_samples: int) -> tuple[Tensor, torchembed.SparseFeatures]:
    return torch.randn(num_samples, 5), fixed(num_samples, HOTNESS)


class Trainer:
    """Trains a DLRM a few steps at a time."""

    def __init__(self, dynamic: Dynamic | None) -> None:
        self.model = DLRM(bags(3, 8, dynamic=dynamic), 5, [16, 8], [16, 1])
        tables = [p for n, p in self.model.named_parameters() if "embedding_bags" in n]
        others = [p for n, p in self.model.named_parameters() if "embedding_bags" not in n]
        self._optimizers = (
            torchembed.optim.Adagrad(tables, lr=0.1),
            torch.optim.SGD(others, lr=0.1),
        )

    def train(self, num_steps: int) -> None:
        self.model.train()
        for _ in range(num_steps):
            logits = self.model(*examples(4))
            labels = torch.randint(2, logits.shape).float()
            nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def forward(self, arguments: tuple[Tensor, torchembed.SparseFeatures]) -> np.ndarray:
        self.model.eval()
        with torch.no_grad():
            return self.model(*arguments).numpy()


@pytest.mark.parametrize("dynamic", [Dynamic(deletion_log=100), None], ids=["dynamic", "static"])
def test_answers_follow_the_trainer(dynamic: Dynamic | None, tmp_path: Path) -> None:
    torch.manual_seed(3)
    trainer = Trainer(dynamic)
    trainer.train(2)
    deploy(trainer.model, tmp_path, name="m", version=1, examples=examples(4))
    asked = examples(16)
    request = {"dense_features": asked[0].numpy(), **feature_arrays(asked[1])}
    options = SourceOptions(discovery_seconds=0.1, session_timeout_seconds=1.0)
    with (
        running_brokers() as brokers,
        MemoryStore() as store,
        ModelRepository(tmp_path, options_over(store)) as repository,
    ):
        for topic in ("torchembed.m.t0", "torchembed.m.t1", "torchembed.m.t2"):
            brokers.make_topic(topic, 2)
        brokers.make_topic("torchembed-dense.m", 1)
        brokers.make_topic("torchembed.n.t0", 1)
        repository.start()
        model = repository.model("m")
        before = model.answer(request)
        assert before.version == "1"
        source = UpdateSource(brokers.addresses, "g", options)
        applying = ApplierOptions(poll_timeout_seconds=0.05)
        with (
            UpdateApplier(source, repository, applying) as applier,
            ModelPublisher(
                trainer.model, "m", brokers.addresses, is_deployed=dynamic is not None
            ) as publisher,
            ModelPublisher(trainer.model, "n", brokers.addresses) as unknown,
        ):
            unknown.publish(2)
            for version in range(2, LAST_VERSION + 1):
                trainer.train(3)
                publisher.publish(version, whole=dynamic is None)
            publisher.flush()
            unknown.flush()
            expected = trainer.forward(asked)
            # The same numbers, but products may be added up in another order for another form.
            bound = 2e-6 * max(1.0, float(abs(expected).max()))
            deadline = time.monotonic() + LIMIT_SECONDS
            while True:
                answer = model.answer(request)
                found = answer.outputs["output"]
                statistics = applier.statistics()
                is_last = answer.version == str(LAST_VERSION)
                is_told = DropReason.UNKNOWN in statistics.num_dropped
                if is_last and is_told and abs(found - expected).max() <= bound:
                    break
                assert time.monotonic() < deadline, (answer, expected, statistics)
                time.sleep(0.01)
    assert abs(before.outputs["output"] - expected).max() > 100 * bound
    # Some may come again where a topic is found late.
    assert statistics.num_dropped.keys() <= {DropReason.UNKNOWN, DropReason.REPEATED}
    assert statistics.dense_versions == {"m": LAST_VERSION}
    assert all(model == "m" for model, _ in statistics.tables)
