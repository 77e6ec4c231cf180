"""A process group of all ranks for small objects, with a time limit and errors that name ranks."""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from torchembed.core import ranks
from torchembed.core.ranks.roll_call import RollCall

T = TypeVar("T")

_num_made = 0


class CpuGroup:
    """Gloo process group of all ranks, for collectives of picklable objects through the CPU.

    Collectives may run in any thread, one at a time. They wait no longer than the time limit, and
    their error names the ranks that did not call them. After such an error the group is unusable.

    Without a default process group, or with one of a single rank, nothing is sent.
    """

    def __init__(self, what: str, timeout: datetime.timedelta | None = None) -> None:
        """Make the group; collective over all ranks.

        Args:
            what: the action that the group is made for, to complete the error "could not ...".
            timeout: how long a rank waits for the others; the default process group's where None.

        Raises:
            TimeoutError: names the ranks that did not come in time.
        """
        global _num_made  # noqa: PLW0603 - names what ranks make in one order
        self.timeout = ranks.default_timeout() if timeout is None else timeout
        self._group: dist.ProcessGroup | None = None
        if ranks.world_size() > 1:
            self._roll_call = RollCall(f"cpu-group/{_num_made}", self.timeout)
            # dist.new_group does not say which rank is missing, so a roll call comes first.
            self._roll_call.wait_for_all(what)
            with self._naming_ranks(what):
                group = dist.new_group(backend="gloo", timeout=self.timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
            _num_made += 1

    def close(self) -> None:
        """End the group; not collective, and once on a rank."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def gather(self, item: T, what: str) -> list[T]:
        """Every rank's ``item``, in the order of the ranks; on every rank.

        Raises:
            TimeoutError, ConnectionError: if ranks did not come, as failing to do ``what``.
        """
        if self._group is None:
            return [item]
        items: list[T] = [item] * ranks.world_size()
        with self._collective(what):
            dist.all_gather_object(items, item, group=self._group)
        return items

    def gather_on_first_rank(self, item: T, what: str) -> list[T] | None:
        """Every rank's ``item`` on rank 0, None on the others; raises as :meth:`gather` does."""
        if self._group is None:
            return [item]
        items = [item] * ranks.world_size() if ranks.rank() == 0 else None
        with self._collective(what):
            dist.gather_object(item, items, dst=0, group=self._group)
        return items

    def scatter_from_first_rank(self, items: Sequence[T] | None, what: str) -> T:
        """The item of rank 0's ``items`` that is this rank's; raises as :meth:`gather` does."""
        if self._group is None:
            assert items is not None
            return items[0]
        mine: list[T] = [None]  # type: ignore[list-item]
        with self._collective(what):
            all_items = None if items is None else list(items)
            dist.scatter_object_list(mine, all_items, src=0, group=self._group)
        return mine[0]

    def from_first_rank(self, item: T, what: str) -> T:
        """Rank 0's ``item`` on every rank; raises as :meth:`gather` does."""
        if self._group is None:
            return item
        items = [item]
        with self._collective(what):
            dist.broadcast_object_list(items, src=0, group=self._group)
        return items[0]

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        self._roll_call.arrive()
        with self._naming_ranks(what):
            yield

    @contextmanager
    def _naming_ranks(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:
            raise self._roll_call.error_of(failure, what) from failure
