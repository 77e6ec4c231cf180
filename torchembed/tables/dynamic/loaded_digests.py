"""Digests of ids that are loaded, which lookups believe."""

from collections.abc import Mapping

from torch import Tensor

from torchembed.core.stand_ins import is_stand_in
from torchembed.ops.hash_table import key_digests

_NUM_AT_ONCE = 1 << 20
"""Ids that are hashed at once, so that large tables take little memory."""


def wrong_digests(contents: Mapping[str, Tensor]) -> list[str]:
    """The names of those digests in ``index_contents`` of a table that are not their ids': each is
    that of the id in its place, or 0 where there is none. Waits for their device.

    Args:
        contents: by name; ``digests`` are those of ``ids``, and ``counted_digests`` of
            ``counted_ids``. None are wrong of tensors without elements of their own.
    """
    pairs = [("ids", "digests"), ("counted_ids", "counted_digests")]
    return [
        name
        for of_ids, name in pairs
        if name in contents and not _belong_together(contents[of_ids], contents[name])
    ]


def _belong_together(ids: Tensor, digests: Tensor) -> bool:
    if ids.is_meta or is_stand_in(ids):
        return True
    chunks = zip(ids.split(_NUM_AT_ONCE), digests.split(_NUM_AT_ONCE), strict=True)
    return all(
        bool(((held == 0) | (held == key_digests(of.to(held.device)))).all()) for of, held in chunks
    )
