"""The admission epochs of an index: when its rows were used, and which of them are in use."""

import torch
from torch import Tensor

from torchembed.tables.row_index import Admission


class AdmissionClock:
    """Numbers the batches that an index admits, from 1 on, and knows up to which they are trained.

    Pipelines number their batches from 1 on too, each by itself, and forwards that were not
    prepared ahead have no numbers. All are counted here on the device, without waiting for it.

    Args:
        device: of the index.

    Attributes:
        numbers: int64 ``[6]``, the state: the epoch of the last batch; the last epoch whose rows
            are not in use; the epoch here of a pipeline's batch less its number there; the epoch of
            the last batch that was prepared ahead; that of the last one of these that was trained;
            and the last epoch of forwards that an update has trained.
    """

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros(6, dtype=torch.int64, device=device)
        views = self.numbers.split(1)
        self.last, self._released, self._shift, self._prepared, self._trained, self._ended = views
        """``last``: int64 ``[1]``, the epoch of the last batch that was admitted to be trained."""

    @property
    def released(self) -> Tensor:
        """int64 ``[1]``: the last epoch whose rows are not in use, since they were trained."""
        return self._released

    def evictable(self, epoch: Tensor) -> Tensor:
        """int64 ``[1]``: a batch of ``epoch`` may evict rows that were used in this one last, or
        before.

        The batch before keeps its rows even where it is trained, since it is not yet where batches
        are prepared ahead: so that a loop by hand evicts the rows that a pipeline does.
        """
        return torch.minimum(self._released, epoch - 2)

    def admitted(self, admission: Admission) -> Tensor:
        """The epoch of a batch, int64 ``[1]``, after all whose rows are not in use."""
        is_trained, number, _ = admission
        if number is None:
            # Forwards share an epoch until an update has trained them.
            epoch = torch.maximum(self.last, torch.maximum(self._released, self._ended) + 1)
            _set(self.last, epoch, is_trained)
            return epoch
        # With nothing under way, epochs follow one another, whichever pipeline comes.
        is_idle = self._trained >= self._prepared
        after_all, after_released = self.last + 1 - number, self._released + 1 - number
        shift = torch.where(is_idle, after_all, torch.maximum(self._shift, after_released))
        epoch = number + shift
        _set(self._trained, torch.where(is_idle, epoch - 1, self._trained), is_trained)
        _set(self._prepared, torch.maximum(self._prepared, epoch), is_trained)
        _set(self._shift, shift, is_trained)
        _set(self.last, torch.maximum(self.last, epoch), is_trained)
        return epoch

    def release(self, number: Tensor, *, keeps_rows: bool = False) -> None:
        """A pipeline has trained its batch of this ``number``, int64 ``[1]``, and those before it:
        let go of their rows, unless all rows stay in use."""
        epoch = torch.minimum(number + self._shift, self._prepared)
        self._trained.copy_(torch.maximum(self._trained, epoch))
        if not keeps_rows:
            self._released.copy_(torch.maximum(self._released, self._trained))

    def renew(self, epoch: Tensor, is_trained: Tensor | None) -> Tensor:
        """Take the rows of a batch of ``epoch``, int64 ``[1]``, into use again, where a pipeline
        has let go of them that has not trained it: the batch gets another epoch, in place.

        Args:
            is_trained: bool ``[1]``; None for True.

        Returns:
            bool ``[1]``: whether it was so.
        """
        is_released = epoch <= self._released
        if is_trained is not None:
            is_released = is_released & is_trained
        added = torch.where(is_released, self._released + 1 - epoch, 0)
        epoch.add_(added)
        # The release of the batch, and the next batches, come behind it.
        self._shift.add_(added)
        for number in (self._prepared, self.last):
            _set(number, torch.maximum(number, epoch), is_released)
        return is_released

    def release_prepared(self, *, keeps_rows: bool = False) -> None:
        """No batch that was prepared ahead is under way any more: it is not trained, or prepared
        again. Let go of their rows, unless all rows stay in use."""
        self._trained.copy_(torch.maximum(self._trained, self._prepared))
        if not keeps_rows:
            self._released.copy_(torch.maximum(self._released, self._trained))

    def release_forwards(self, *, keeps_rows: bool = False) -> None:
        """An update has trained all batches but those that were prepared ahead and are still to
        be trained: let go of their rows, unless all rows stay in use."""
        self._ended.copy_(self.last)
        if keeps_rows:
            return
        is_idle = self._trained >= self._prepared
        last = torch.where(is_idle, self.last, torch.minimum(self.last, self._trained))
        self._released.copy_(torch.maximum(self._released, last))

    def go_on_behind(self, last: Tensor) -> None:
        """Go on behind the epoch ``last``, int64 ``[1]``, too, with nothing under way."""
        last = torch.maximum(self.last, last.to(self.last.device))
        self.numbers.copy_(torch.cat([last, last, torch.zeros_like(last).expand(4)]))

    def to(self, device: torch.device) -> "AdmissionClock":
        """A clock of the same epochs on another device."""
        made = AdmissionClock(device)
        made.numbers.copy_(self.numbers)
        return made


def _set(number: Tensor, new: Tensor, is_set: Tensor | None) -> None:
    """Make ``number`` the ``new`` one, in place, where ``is_set``, or it is None."""
    number.copy_(new if is_set is None else torch.where(is_set, new, number))
