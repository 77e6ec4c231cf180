"""Notices that ranks come to by themselves, and act on only where all of them have."""

import itertools
import time

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from torchembed.core import ranks

PATIENCE_SECONDS = 5.0
"""The time that a rank waits for the others to notice what it has."""
_POLL_SECONDS = 5e-4


class JointNotices:
    """Finds out, in the default process group's store, whether all ranks notice the same.

    Only ranks that notice something ask, so that a step in which nothing is noticed costs nothing.
    Made by all ranks, in the same order as others.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._numbers)

    def are_joint(self, what: str) -> bool:
        """True where every rank notices ``what``, once, and none over ``PATIENCE_SECONDS`` later
        than another one; the same on all ranks that ask. Others need not ask, and wait for nobody.
        """
        num_ranks = ranks.world_size()
        if num_ranks == 1:
            return True
        store = PrefixStore(f"torchembed/notices/{self._number}/{what}", _get_default_store())
        # The first verdict is that of all: the last rank to ask may come when another gives up.
        if store.add("ranks", 1) == num_ranks:
            return store.compare_set("verdict", "", "all") == b"all"
        limit = time.monotonic() + PATIENCE_SECONDS
        while not store.check(["verdict"]):
            if time.monotonic() > limit:
                return store.compare_set("verdict", "", "some") == b"all"
            time.sleep(_POLL_SECONDS)
        return store.get("verdict") == b"all"
