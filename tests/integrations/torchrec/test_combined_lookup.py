"""Several placements in one module are sent, looked up and updated at once, as TorchRec does in
turn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

NUM_UPDATES = 5
"""In gloo TorchRec's own gradients of other batches on each rank fail."""
PLACEMENTS = {
    "tables and rows": ["table_wise", "row_wise", "table_wise"],
    "rows and tables": ["row_wise", "table_wise", "row_wise"],
    "one table": ["table_wise", "row_wise", "row_wise"],
}


class Answers(NamedTuple):
    """Of ours, then of theirs, in each case."""

    features: list[dict[str, Any]]
    """What a rank is sent."""
    vectors: list[np.ndarray]
    weights: list[np.ndarray]
    """After some steps."""


class Case(NamedTuple):
    name: str
    answers: Answers
    num_exchanges: int
    """By which ours sends features."""


def sent(parts: Any) -> dict[str, Any]:
    """The features of all placements."""
    return {
        "keys": [key for part in parts for key in part.keys()],  # noqa: SIM118
        "strides": {part.stride() for part in parts},
        "values": [value for part in parts for value in part.values().tolist()],
        "lengths": [length for part in parts for length in part.lengths().tolist()],
    }


def answers_of(
    name: str,
    device: torch.device,
    batches: Sequence[Any],
    *,
    apart: bool = False,
    tracked: bool = False,
) -> Case:
    """With ``apart``, tables of each placement have a learning rate of their own; with ``tracked``,
    what is looked up in those of each is shown to a tracker, and is part of the answers."""
    from tests.support import torchrec_training as training

    answers, num_exchanges = Answers([], [], []), 0
    seen: list[Any] = []
    for whose in ("theirs", "ours"):
        run = training.make_run(
            whose,
            device,
            PLACEMENTS[name],
            torch.optim.Adagrad,
            {"lr": 0.1, "eps": 1e-6},
            tables=["a", "b", "c"],
        )
        (module,) = (m for m in run.model.modules() if hasattr(m, "input_dist"))
        if apart:
            for number, group in enumerate(run.model.fused_optimizer.param_groups):
                group["lr"] = 0.1 * (1 + number)
        if tracked:
            module.register_post_lookup_tracker_fn(lambda *found: seen.append(found))
        for number, batch in enumerate(batches):
            run.model.fused_optimizer.zero_grad()
            context = module.create_context()
            features = module.input_dist(context, batch).wait().wait()
            num_exchanges = len(features)
            vectors = module.compute_and_output_dist(context, features).wait()
            values = torch.cat([vectors[key] for key in sorted(vectors.keys())], dim=1)
            if number < NUM_UPDATES:
                (values * torch.linspace(-1, 1, values.shape[1], device=device)).sum().backward()
            answers.features.append(sent(features))
            for its_features, its_vectors, *_ in seen:
                answers.features.append(sent([its_features]))
                answers.vectors.append(its_vectors.detach().cpu().numpy())
            seen.clear()
            answers.vectors.append(values.detach().cpu().numpy())
        answers.weights.append(training.weights_of(run).numpy())
    return Case(f"{name}, {apart=}, {tracked=}", answers, num_exchanges)


def everything(device_type: str) -> list[Case]:
    """On a rank."""
    from tests.support import torchrec_training as training

    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    batches = [
        # The first time TorchRec looks at the features; sizes and orders are kept from the second.
        training.batch(step, device, weighted=False, ids_dtype=torch.int64, size=size)[1]
        for step, size in enumerate((3, 3, 3, 0, 4, 4 + rank, rank))
    ]
    found = [answers_of(name, device, batches) for name in PLACEMENTS]
    found.append(answers_of("tables and rows", device, batches, apart=True))
    found.append(answers_of("tables and rows", device, batches, tracked=True))
    return found


def test_ranks_get_the_same_in_one_exchange(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for case in answer["combined_lookup"]:
            features = case.answers.features
            theirs, ours = features[: len(features) // 2], features[len(features) // 2 :]
            assert case.num_exchanges == 1, case.name
            assert ours == theirs, case.name


def test_vectors_and_updates_are_theirs(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for case in answer["combined_lookup"]:
            vectors, weights = case.answers.vectors, case.answers.weights
            half = len(vectors) // 2
            for theirs, ours in zip(vectors[:half], vectors[half:], strict=True):
                # Sums of at most four rows of elements below one, over two ranks.
                assert np.allclose(ours, theirs, rtol=0, atol=64 * torch.finfo().eps), case.name
            assert np.allclose(*weights, rtol=1e-5, atol=1e-6), case.name
