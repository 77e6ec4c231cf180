"""Flat tensors of ids, or of their weights, from nested Python lists."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = int | float
Bags: TypeAlias = Sequence[object]
"""A feature's bag for each sample: a sequence of numbers, a one-dimensional tensor or array, or one
number."""

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def bags_of_features(name: str, features: Mapping[str, Bags]) -> list[list[list[Number]]]:
    """The bags of each feature as lists, ``[F][B][ids]``.

    Args:
        name: name of the argument, for errors.
        features: from each feature to a bag for each sample: a sequence, a one-dimensional tensor
            or array, or one number.

    Raises:
        TypeError: for a feature that is no sequence of bags.
        ValueError: if features have different numbers of samples.
    """
    found = {feature: _bags(name, feature, bags) for feature, bags in features.items()}
    sizes = {feature: len(bags) for feature, bags in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{name} must have one number of samples for all features, got {sizes}")
    return list(found.values())


def _bags(name: str, feature: str, bags: Bags) -> list[list[Number]]:
    if isinstance(bags, (str, bytes, Mapping)) or not hasattr(bags, "__len__"):
        raise TypeError(
            f"{name} of feature {feature} must be a sequence with a bag for each sample, "
            f"got {bags!r}"
        )
    # An array or tensor: its numbers come one by one otherwise, which is slow.
    to_list = getattr(bags, "tolist", None)
    bags = bags if to_list is None else to_list()
    return [_bag(name, feature, sample, bag) for sample, bag in enumerate(bags)]


def _bag(name: str, feature: str, sample: int, bag: Any) -> list[Number]:
    if isinstance(bag, (list, tuple)):
        return list(bag)
    if hasattr(bag, "tolist"):
        found = bag.tolist()
        return found if isinstance(found, list) else [found]
    if isinstance(bag, (int, float)):
        return [bag]
    raise TypeError(
        f"{name} of feature {feature}, sample {sample}, must be a list of numbers or one number, "
        f"got {bag!r}"
    )


def flat_ids(features: Sequence[str], bags: Sequence[Sequence[Sequence[Number]]]) -> Tensor:
    """The numbers of ``bags [F][B][ids]`` as int64 ``[L]``; those from 2**63 to 2**64 - 1 by their
    bits.

    Raises:
        TypeError: for a value that is no whole number, by feature and sample.
    """
    return _flat("ids", "whole numbers", features, bags, _INTEGERS, _id_tensor).to(torch.int64)


def flat_weights(features: Sequence[str], bags: Sequence[Sequence[Sequence[Number]]]) -> Tensor:
    """The numbers of ``bags [F][B][ids]`` as float32 ``[L]``.

    Raises:
        TypeError: for a value that is no number, by feature and sample.
    """
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *_INTEGERS)
    return _flat("weights", "numbers", features, bags, kinds, _tensor).to(torch.float32)


def _flat(
    name: str,
    kind: str,
    features: Sequence[str],
    bags: Sequence[Sequence[Sequence[Number]]],
    dtypes: Sequence[torch.dtype],
    as_tensor: Callable[[Sequence[Number]], Tensor | None],
) -> Tensor:
    flat = as_tensor([number for of_feature in bags for bag in of_feature for number in bag])
    if flat is not None and (flat.numel() == 0 or flat.dtype in dtypes):
        return flat
    for feature, of_feature in zip(features, bags, strict=True):
        for sample, bag in enumerate(of_feature):
            tensor = as_tensor(bag)
            if tensor is None or (tensor.numel() and tensor.dtype not in dtypes):
                raise TypeError(
                    f"{name} of feature {feature}, sample {sample}, must be {kind}, got {bag!r}"
                )
    raise TypeError(f"{name} must be {kind} of one kind")


def _tensor(numbers: Sequence[Number]) -> Tensor | None:
    """``numbers`` as a one-dimensional tensor of the dtype that torch gives them; None where they
    make none."""
    try:
        tensor = torch.tensor(numbers, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return tensor if tensor.dim() == 1 else None


def _id_tensor(numbers: Sequence[Number]) -> Tensor | None:
    """:func:`_tensor`, where numbers that only uint64 holds become int64 of the same bits."""
    tensor = _tensor(numbers)
    if tensor is not None or not all(isinstance(n, int) and n < 2**64 for n in numbers):
        return tensor
    return _tensor([n - 2**64 if n >= 2**63 else n for n in numbers])
