"""Lookups and updates between TorchRec's exchanges, on batches of sizes that differ by rank, step
and feature."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

NUM_UPDATES = 5
"""In gloo TorchRec's own gradients of other batches on each rank fail."""
PLACEMENTS = ["table_wise", "row_wise", "table_wise"]
MAX_IDS = 4
"""Most ids in a bag."""


class Answers(NamedTuple):
    """Results of TorchRec's kernels or of ours."""

    vectors: list[np.ndarray]
    weights: np.ndarray
    """After some steps."""


class Compared(NamedTuple):
    theirs: Answers
    ours: Answers


def bags(
    whose: str, device: torch.device, *, apart: bool = False, tracked: bool = False
) -> Answers:
    """With ``apart``, tables of each placement have a learning rate of their own; with ``tracked``,
    what is looked up in those of each is shown to a tracker, and is part of the answers."""
    from tests.support import torchrec_training as training

    rank = dist.get_rank()
    run = training.make_run(
        whose,
        device,
        PLACEMENTS,
        torch.optim.Adagrad,
        {"lr": 0.1, "eps": 1e-6},
        tables=["a", "b", "c"],
    )
    module, seen, found = run.model.module.sparse, [], []
    if apart:
        for number, group in enumerate(run.model.fused_optimizer.param_groups):
            group["lr"] = 0.1 * (1 + number)
    if tracked:
        module.register_post_lookup_tracker_fn(lambda *looked_up: seen.append(looked_up[1]))
    for step, size in enumerate((3, 3, 3, 0, 4, 4 + rank, rank)):
        batch = training.batch(step, device, weighted=False, ids_dtype=torch.int64, size=size)[1]
        run.model.fused_optimizer.zero_grad()
        vectors = module(batch).wait()
        values = torch.cat([vectors[key] for key in sorted(vectors.keys())], dim=1)
        if step < NUM_UPDATES:
            (values * torch.linspace(-1, 1, values.shape[1], device=device)).sum().backward()
        found += [each.detach().cpu().numpy() for each in (*seen, values)]
        seen.clear()
    return Answers(found, training.weights_of(run).numpy())


def sequences(whose: str, placement: str, device: torch.device) -> Answers:
    """Each feature has a batch size of its own."""
    import torchrec

    from tests.support import torchrec_training as training

    run = training.make_run(
        whose, device, [placement], torch.optim.SGD, {"lr": 0.1}, is_sequence=True
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes, found = {"user": 3, "item": 2, "words": 4, "tags": 1}, []
    for _ in range(2):
        lengths = torch.randint(0, MAX_IDS, (sum(sizes.values()),), generator=generator)
        batch = torchrec.KeyedJaggedTensor(
            keys=list(sizes),
            values=torch.randint(0, 30, (int(lengths.sum()),), generator=generator),
            lengths=lengths.int(),
            stride_per_key_per_rank=[[size] for size in sizes.values()],
            inverse_indices=(
                list(sizes),
                torch.stack([torch.arange(5) % size for size in sizes.values()]),
            ),
        ).to(device)
        vectors = run.model.module.sparse(batch).wait()
        values = torch.cat([vectors[key].values() for key in sorted(vectors)])
        (values * torch.linspace(-1, 1, values.shape[1], device=device)).sum().backward()
        found.append(values.detach().cpu().numpy())
    return Answers(found, training.weights_of(run).numpy())


def everything(device_type: str) -> dict[str, Compared]:
    """On a rank."""
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    whose: Sequence[str] = ("theirs", "ours")
    found = {
        "bags": Compared(*(bags(each, device) for each in whose)),
        "bags, rates apart": Compared(*(bags(each, device, apart=True) for each in whose)),
        "bags, tracked": Compared(*(bags(each, device, tracked=True) for each in whose)),
    }
    for placement in ("table_wise", "row_wise", "column_wise"):
        found[f"sequences, {placement}"] = Compared(
            *(sequences(each, placement, device) for each in whose)
        )
    return found


def test_vectors_and_updates_are_theirs(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for name, (theirs, ours) in answer["lookups"].items():
            for their_vectors, our_vectors in zip(theirs.vectors, ours.vectors, strict=True):
                # Sums of at most four rows of elements below one, over two ranks.
                tolerance = 64 * torch.finfo().eps
                assert np.allclose(our_vectors, their_vectors, rtol=0, atol=tolerance), name
            assert np.allclose(ours.weights, theirs.weights, rtol=1e-5, atol=1e-6), name
