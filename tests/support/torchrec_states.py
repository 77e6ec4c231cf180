"""State dicts of TorchRec's modules on several ranks, in forms that compare."""

import itertools
from typing import Any

import torch
import torch.distributed as dist


def described(value: Any) -> Any:
    """A state dict with what its leaves are in place of them."""
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    if isinstance(value, list):
        return [described(part) for part in value]
    form = tuple(value.size()) if hasattr(value, "size") else value
    return type(value).__name__, str(getattr(value, "dtype", None)), str(form)


def elements(state: Any, name: str = "") -> dict[str, dict[Any, float]]:
    """The parts of a state's tensors on this rank: by name, each element by where it is."""
    if isinstance(state, dict):
        found: dict[str, dict[Any, float]] = {}
        for key, part in state.items():
            found |= elements(part, f"{name}/{key}")
        return found
    if hasattr(state, "local_shards"):
        parts = [(shard.metadata.shard_offsets, shard.tensor) for shard in state.local_shards()]
    elif isinstance(state, torch.Tensor):
        parts = [([0] * state.dim(), state)]
    else:
        return {}
    of_tensor: dict[Any, float] = {}
    for offsets, part in parts:
        ranges = [range(o, o + n) for o, n in zip(offsets, part.shape, strict=True)]
        values = map(float, part.flatten().tolist())
        of_tensor.update(zip(itertools.product(*ranges), values, strict=True))
    return {name: of_tensor}


def whole_state(state: Any) -> dict[str, dict[Any, float]]:
    """The elements that all ranks hold together; a rank knows the state of its own tables only."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, elements(state))
    merged: dict[str, dict[Any, float]] = {}
    for found in of_ranks:
        for name, part in found.items():
            merged.setdefault(name, {}).update(part)
    return merged
