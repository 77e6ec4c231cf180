"""The rank, of those that share a dynamic table, that holds the row of an id."""

from torchembed.ops.id_shares.function import are_in_share, shares_of_ids

__all__ = ["are_in_share", "shares_of_ids"]
