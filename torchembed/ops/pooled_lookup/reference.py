"""The specification of the ``pooled_lookup`` operations in eager torch."""

import torch
from torch import Tensor


def bag_lengths(
    offsets: Tensor | None, hotness: list[int], batch_size: int, device: torch.device
) -> Tensor:
    """Ids in each feature-major bag, int64 ``[F * B]``."""
    if offsets is not None:
        return offsets.diff().long()
    return torch.tensor(hotness, device=device, dtype=torch.int64).repeat_interleave(batch_size)


def bags_of_ids(offsets: Tensor | None, lengths: Tensor, num_ids: int) -> Tensor:
    """The feature-major bag of each id position, int64 ``[L]``; ``F * B`` past the last bag."""
    if offsets is not None:
        positions = torch.arange(num_ids, device=offsets.device, dtype=offsets.dtype)
        return torch.searchsorted(offsets[1:].contiguous(), positions, right=True)
    bags = torch.arange(lengths.numel(), device=lengths.device)
    return torch.repeat_interleave(bags, lengths, output_size=num_ids)


def pooled_lookup_forward_reference(
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    lengths = bag_lengths(offsets, hotness, batch_size, rows.device)
    if offsets is None:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    vectors = torch.zeros(rows.numel(), weight.shape[1], device=weight.device)
    if weight.shape[0]:
        vectors = weight[rows.long().clamp_min(0)].float()
    vectors = torch.where((rows >= 0).unsqueeze(1), vectors, 0.0)
    if per_id_weights is not None:
        vectors = vectors * per_id_weights.float().unsqueeze(1)
    # segment_reduce adds in one order on every device; index_add_ uses atomics on a GPU.
    pooled = torch.segment_reduce(vectors, "sum", offsets=offsets, unsafe=True, initial=0)
    if mean:
        pooled = pooled / lengths.clamp_min(1).unsqueeze(1)
    by_feature = pooled.view(num_features, batch_size, weight.shape[1])
    return by_feature.transpose(0, 1).contiguous().to(output_dtype)


def pooled_lookup_gradient_map_reference(
    ids_like: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    per_id_weights: Tensor | None,
    num_features: int,
    batch_size: int,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    num_ids = ids_like.numel()
    lengths = bag_lengths(offsets, hotness, batch_size, ids_like.device)
    bags = bags_of_ids(offsets, lengths, num_ids)
    in_bag = bags < num_features * batch_size
    samples = max(batch_size, 1)
    gradient_rows = torch.where(in_bag, (bags % samples) * num_features + bags // samples, 0)
    scales = torch.ones(num_ids if mean or per_id_weights is not None else 0, device=bags.device)
    if per_id_weights is not None:
        scales = per_id_weights.float()
    if mean:
        divisors = torch.nn.functional.pad(lengths, (0, 1), value=1)
        scales = scales / divisors[bags]
    return gradient_rows.to(torch.int32), scales.clone()


def pooled_lookup_weights_backward_reference(
    grad: Tensor,
    weight: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    hotness: list[int],
    mean: bool,
) -> Tensor:
    batch_size, num_features, dim = grad.shape
    gradient_rows, scales = pooled_lookup_gradient_map_reference(
        rows, offsets, hotness, None, num_features, batch_size, mean
    )
    if weight.shape[0] == 0 or batch_size * num_features == 0:
        return torch.zeros(rows.numel(), device=weight.device)
    vectors = weight[rows.long().clamp_min(0)].float()
    by_bag = grad.reshape(batch_size * num_features, dim)
    products = (by_bag[gradient_rows.long()].float() * vectors).sum(dim=1)
    if mean:
        products = products * scales
    return torch.where(rows >= 0, products, 0.0)
