"""Batches of made clicks and histories."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

import torchembed
from tests.zoo.sizes import Sizes
from torchembed.data import Batch


def keys(sizes: Sizes) -> tuple[str, ...]:
    """The sparse features of a click."""
    return tuple(f"f{number}" for number in range(sizes.num_features))


def clicks(sizes: Sizes, count: int) -> list[Batch]:
    """Dense features, one id of each sparse feature, labels."""
    return [_click(sizes, seed, (1,) * sizes.num_features) for seed in range(count)]


def bags(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with one, two or three ids of each feature."""
    hotness = tuple(1 + number % 3 for number in range(sizes.num_features))
    return [_click(sizes, seed, hotness) for seed in range(count)]


def jagged_clicks(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with up to three ids of each feature."""
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        num_bags = sizes.num_features * sizes.batch_size
        lengths = torch.randint(4, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        click = _click(sizes, seed, (1,) * sizes.num_features)
        sparse = torchembed.SparseFeatures(
            keys=keys(sizes),
            values=torch.randint(sizes.num_rows, (int(offsets[-1]),), generator=generator),
            offsets=offsets,
            batch_size=sizes.batch_size,
        )
        batches.append(Batch(click.dense, sparse.to(sizes.device), click.labels))
    return batches


def weighted_bags(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with two ids of each feature and a weight of each id."""
    batches = []
    for seed in range(count):
        click = _click(sizes, seed, (2,) * sizes.num_features)
        ids = click.sparse.values
        generator = torch.Generator().manual_seed(seed)
        sparse = torchembed.SparseFeatures(
            keys=keys(sizes),
            values=ids,
            hotness=(2,) * sizes.num_features,
            batch_size=sizes.batch_size,
            weights=torch.rand(ids.shape, generator=generator).to(sizes.device),
        )
        batches.append(click._replace(sparse=sparse))
    return batches


def _click(sizes: Sizes, seed: int, hotness: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(sizes.num_rows, (sum(hotness) * sizes.batch_size,), generator=generator)
    sparse = torchembed.SparseFeatures(
        keys=keys(sizes), values=ids, hotness=hotness, batch_size=sizes.batch_size
    )
    dense = torch.randn(sizes.batch_size, sizes.num_dense, generator=generator)
    noise = torch.randn(sizes.batch_size, generator=generator)
    return Batch(dense, sparse, (dense[:, 0] + noise > 0).float()).to(sizes.device)


class History(NamedTuple):
    """Histories of users, and what they saw next."""

    items: Tensor
    """int64 ``[B, T]``; 0 where a history is shorter."""
    target: Tensor
    """int64 ``[B]``."""
    label: Tensor
    """``[B]``, whether the target was clicked."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "History":
        """The same on ``device``."""
        return History(*(part.to(device, non_blocking=non_blocking) for part in self))


def histories(sizes: Sizes, count: int) -> list[History]:
    """Histories padded to one length."""
    return [_history(sizes, seed, sizes.history) for seed in range(count)]


def histories_of_any_length(sizes: Sizes, count: int) -> list[History]:
    """Histories padded to the longest of each batch."""
    return [_history(sizes, seed, sizes.history - seed % 3) for seed in range(count)]


def clicks_of_two_sizes(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks of large and of small batches in turns."""
    small = dataclasses.replace(sizes, batch_size=sizes.batch_size // 2)
    return [clicks(small if seed % 2 else sizes, seed + 1)[-1] for seed in range(count)]


def bags_between_offsets(sizes: Sizes, count: int) -> list[dict[str, Tensor]]:
    """Ids ``[L]`` of bags that begin at offsets, weights of them, and labels; another L in each."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(sizes.history, (sizes.batch_size,), generator=generator)
        num_ids = int(lengths.sum())
        batch = {
            "values": torch.randint(sizes.num_rows, (num_ids,), generator=generator),
            "offsets": lengths.cumsum(0) - lengths,
            "weights": torch.rand(num_ids, generator=generator),
            "label": torch.randint(2, (sizes.batch_size,), generator=generator).float(),
        }
        found.append({name: tensor.to(sizes.device) for name, tensor in batch.items()})
    return found


def _history(sizes: Sizes, seed: int, length: int) -> History:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(1, sizes.num_rows, shape, generator=generator)

    items = ids(sizes.batch_size, length)
    lengths = torch.randint(1, length + 1, (sizes.batch_size, 1), generator=generator)
    items[torch.arange(length) >= lengths] = 0
    label = torch.randint(2, (sizes.batch_size,), generator=generator).float()
    return History(items, ids(sizes.batch_size), label).to(sizes.device)


def sessions(sizes: Sizes, count: int) -> list[dict[str, object]]:
    """Histories as sparse features, with the label of each, in a dict."""
    found: list[dict[str, object]] = []
    for history in histories(sizes, count):
        values = torch.cat([history.items.flatten(), history.target])
        features = torchembed.SparseFeatures(
            keys=("history", "target"),
            values=values,
            hotness=(sizes.history, 1),
            batch_size=sizes.batch_size,
        )
        found.append({"features": features, "label": history.label})
    return found


def jagged_sessions(sizes: Sizes, count: int) -> list[dict[str, object]]:
    """Histories and categories of any length, and a target, with the label of each sample."""
    found: list[dict[str, object]] = []
    for seed, history in enumerate(histories(sizes, count)):
        generator = torch.Generator().manual_seed(seed)
        of_categories = torch.randint(4, (sizes.batch_size,), generator=generator)
        shown = history.items.cpu()
        ones = torch.ones_like(of_categories)
        lengths = torch.cat([of_categories, ones, (shown > 0).sum(1)])
        num_categories = int(of_categories.sum())
        categories = torch.randint(sizes.num_rows, (num_categories,), generator=generator)
        features = torchembed.SparseFeatures(
            keys=("categories", "target", "history"),
            values=torch.cat([categories, history.target.cpu(), shown[shown > 0]]),
            offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            batch_size=sizes.batch_size,
        )
        found.append({"features": features.to(sizes.device), "label": history.label})
    return found


def mixed_sessions(sizes: Sizes, count: int) -> list[dict[str, object]]:
    """Histories of any length, three categories and a target, with the label of each sample."""
    found = jagged_sessions(sizes, count)
    for seed, (session, history) in enumerate(zip(found, histories(sizes, count), strict=True)):
        generator = torch.Generator().manual_seed(seed)
        categories = torch.randint(sizes.num_rows, (3 * sizes.batch_size,), generator=generator)
        fixed = torchembed.SparseFeatures(
            keys=("categories", "target"),
            values=torch.cat([categories.to(sizes.device), history.target]),
            hotness=(3, 1),
            batch_size=sizes.batch_size,
        )
        is_shown = history.items > 0
        jagged = torchembed.SparseFeatures(
            keys=("history",),
            values=history.items[is_shown],
            offsets=torch.nn.functional.pad(is_shown.sum(1).cumsum(0), (1, 0)),
            batch_size=sizes.batch_size,
        )
        session["features"] = torchembed.MixedFeatures((fixed, jagged))
    return found


def pairs(sizes: Sizes, count: int) -> list[dict[str, Tensor]]:
    """A user and an item of each sample, with its label."""
    batches = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(sizes.num_rows, (2, sizes.batch_size), generator=generator)
        label = torch.randint(2, (sizes.batch_size,), generator=generator).float()
        user, item = ids.to(sizes.device)
        batches.append({"user": user, "item": item, "label": label.to(sizes.device)})
    return batches


def two_tasks(sizes: Sizes, count: int) -> list[dict[str, object]]:
    """Clicks with two labels, in a dict."""
    found: list[dict[str, object]] = []
    for batch in clicks(sizes, count):
        assert batch.dense is not None
        bought = batch.labels * (batch.dense[:, 0] > 0)
        labels = torch.stack([batch.labels, bought], dim=1)
        found.append({"dense": batch.dense, "sparse": batch.sparse, "labels": labels})
    return found


def labels_by_name(sizes: Sizes, count: int) -> list[Batch]:
    """Clicks with labels of two tasks by name, and a mask of where the second is known."""
    found = []
    for batch in clicks(sizes, count):
        assert batch.dense is not None
        is_rated = batch.labels > 0
        rating = batch.dense.sum(1).where(is_rated, torch.nan)
        labels = {"click": batch.labels, "rating": rating, "is_rated": is_rated}
        found.append(batch._replace(labels=labels))
    return found


def tuples_of_ids(sizes: Sizes, count: int) -> list[dict[str, Tensor]]:
    """Clicks whose ids are one tensor ``[F, B]``, as separate modules take them."""
    found = []
    for batch in clicks(sizes, count):
        ids = batch.sparse.values.view(sizes.num_features, sizes.batch_size)
        found.append({"dense": batch.dense, "ids": ids, "label": batch.labels})
    return found
