"""Our exchange of features gives what TorchRec's gives."""

from typing import Any

import torch
import torch.distributed as dist

KEYS = ["a", "b", "c"]


def features(batch_size: int, device: torch.device, *, weighted: bool, seed: int) -> Any:
    import torchrec

    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    lengths = torch.randint(0, 4, (len(KEYS) * batch_size,), generator=generator, dtype=torch.int32)
    count = int(lengths.sum())
    values = torch.randint(0, 1000, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) if weighted else None
    made = torchrec.KeyedJaggedTensor(KEYS, values, lengths=lengths, weights=weights)
    return made.to(device)


def outcome(dist_module: Any, batch: Any) -> dict[str, Any]:
    """What a rank gets, and what TorchRec reads from the awaitable."""
    tensors = dist_module(batch).wait()
    got = tensors.wait()
    weights = got.weights_or_none()
    return {
        "keys": got.keys(),
        "stride": got.stride(),
        "values": got.values().tolist(),
        "lengths": got.lengths().tolist(),
        "weights": None if weights is None else weights.tolist(),
        "batch sizes": tensors._stride_per_rank,
        "sent": tensors._input_splits.get("values"),
        "received": tensors._output_splits.get("values"),
    }


def everything(device_type: str) -> list[tuple[str, Any, Any]]:
    """On a rank: name, ours and theirs of each case."""
    from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
    from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist

    from torchembed.integrations.torchrec.features_dist import FeaturesDist, RowFeaturesDist

    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    group: Any = dist.group.WORLD
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    cases: dict[str, tuple[Any, list[int], list[int]]] = {
        "equal batches": (group, [1, 2], [3, 3]),
        "other batches": (group, [1, 2], [3, 5]),
        "no features": (group, [3, 0], [4, 4]),
        "no samples": (group, [2, 1], [0, 0]),
        "no samples here": (group, [2, 1], [0, 2]),
        "alone": (alone, [3], [3, 4]),
    }
    found = []
    for name, (pg, features_per_rank, batch_sizes) in cases.items():
        ours, theirs = (
            kind(pg, features_per_rank) for kind in (FeaturesDist, TwSparseFeaturesDist)
        )
        for seed, weighted in enumerate((False, True)):
            # Twice, since sizes and orders are kept from the first time.
            for batch_size in (batch_sizes[rank], batch_sizes[rank], batch_sizes[rank] + 1):
                batch = features(batch_size, device, weighted=weighted, seed=seed)
                found.append((name, outcome(ours, batch), outcome(theirs, batch)))
    for seed, weighted in enumerate((False, True)):
        theirs = RwSparseFeaturesDist(group, len(KEYS), [1000, 10, 999], device=device)
        divided = RwSparseFeaturesDist(group, len(KEYS), [1000, 10, 999], device=device)
        ours = RowFeaturesDist(group, divided)
        batch = features(3 + rank, device, weighted=weighted, seed=seed)
        found.append(("rows", outcome(ours, batch), outcome(theirs, batch)))
    return found


def test_every_rank_gets_the_same(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        for name, ours, theirs in answer["features_dist"]:
            if name == "alone":  # nothing is sent, and TorchRec does not say so
                del ours["sent"], ours["received"], theirs["sent"], theirs["received"]
            assert ours == theirs, name
