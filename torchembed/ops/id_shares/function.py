"""The public functions ``shares_of_ids`` and ``are_in_share``."""

from collections.abc import Sequence

from torch import Tensor

from torchembed.ops.id_shares.schema import are_in_share_op, shares_of_ids_op


def shares_of_ids(ids: Tensor, num_shares: int) -> Tensor:
    """The share of each id, among equal shares of all 64-bit integers.

    A hash chooses the share: a function of the id and of ``num_shares`` alone. Never synchronizes.

    Args:
        ids: int32 or int64, ``[L]``; int32 ids have the shares of the same int64 ones.
        num_shares: at least 1, less than 2**31.

    Returns:
        int64 ``[L]``, in ``[0, num_shares)``.

    Raises:
        TypeError, ValueError: for a dtype or a number that does not fit.
    """
    return shares_of_ids_op(ids.contiguous(), num_shares)


def are_in_share(
    ids: Tensor, num_shares: Tensor, shares: Tensor, *, hotness: Sequence[int], batch_size: int
) -> Tensor:
    """Tell which ids are in the share of their feature that is asked for.

    ``out[p] = shares_of_ids(ids[p], num_shares[f]) == shares[f]`` for position p of feature f. All
    ids of a feature with one share are in share 0. Never synchronizes.

    Args:
        ids: int32 or int64, ``[L]``, feature-major.
        num_shares: int64 ``[F]``, at least 1, less than 2**31.
        shares: int64 ``[F]``.
        hotness: ids a bag for each feature.

    Returns:
        bool ``[L]``.

    Raises:
        TypeError, ValueError: for a dtype, shape or device that does not fit.
    """
    return are_in_share_op(ids.contiguous(), list(hotness), num_shares, shares, batch_size)
