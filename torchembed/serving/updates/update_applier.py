"""A thread that applies the updates of a stream to the models that are served."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from torchembed.serving.interface import OutdatedUpdateError, UnknownModelError
from torchembed.serving.updates.applier_statistics import (
    ApplierStatistics,
    ApplierTotals,
    DropReason,
)
from torchembed.serving.updates.row_batches import RowBatch
from torchembed.serving.updates.update_order import UpdateOrder
from torchembed.stores import RowStore
from torchembed.streams import DenseUpdate, RowUpdate, Update, UpdateSource

_LOG = logging.getLogger("torchembed.serving")

_BatchPlace = tuple[str, str, int | None]
"""A model, its table, and the partition where updates of one alone are joined."""


class UpdatedModels(Protocol):
    """Models whose rows and dense parts change while they answer."""

    def apply_rows(
        self,
        model: str,
        table: str,
        keys: Tensor,
        rows: Tensor,
        *,
        version: int,
        deleted_keys: Tensor | None = None,
    ) -> object:
        """Write rows and delete others; lookups that begin after the return see them.

        Raises:
            UnknownModelError, TypeError, ValueError: for what does not fit, and never will.
            OSError, RuntimeError, MemoryError: where it cannot be done now; calling again does no
                harm.
        """
        ...

    def swap_dense(self, model: str, tensors: Mapping[str, Tensor], version: int) -> object:
        """Answer by another dense part from now on; raises as :meth:`apply_rows` does."""
        ...


@dataclass(frozen=True, kw_only=True)
class ApplierOptions:
    """How updates are waited for, and tried again.

    Raises:
        ValueError: for seconds that are not positive, or in the wrong order.
    """

    poll_timeout_seconds: float = 0.5
    """How long it waits for an update before it looks whether it is to end; one that comes is
    applied at once."""
    back_off_seconds: float = 0.05
    """From one attempt to apply an update to the next; twice as long after each."""
    longest_back_off_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not self.poll_timeout_seconds > 0:
            raise ValueError(
                f"poll_timeout_seconds must be more than 0, got {self.poll_timeout_seconds}"
            )
        if not 0 < self.back_off_seconds <= self.longest_back_off_seconds:
            raise ValueError(
                "back_off_seconds must be more than 0 and at most longest_back_off_seconds, got "
                f"{self.back_off_seconds} and {self.longest_back_off_seconds}"
            )


class UpdateApplier:
    """Applies updates in the order of their partitions, each at least once.

    What was applied is committed behind each poll, so that after a crash some updates come again.
    An update that comes again, or is of an earlier version than what was applied, is dropped and
    counted, also after a crash where ``records`` are kept: no row is ever replaced by an older one.
    So is one of a table that is not served, or of other widths or tensors, of which the first of
    each table is logged. Those of models or versions that are not loaded are left to the source.
    What waits for a table is written at once. Where the models' stores are away it tries on until
    they are back, and applies nothing else meanwhile. It is a context manager that starts and
    closes itself.

    Args:
        source: of the updates; it belongs to the applier, which closes it.
        models: that they are applied to, in a thread of the applier's.
        records: the store that keeps the rows of the models when the process ends, in which it is
            kept how far updates were applied; None where the order is that of one run.

    Raises:
        RowStoreError, OSError: where ``records`` cannot be opened.
    """

    def __init__(
        self,
        source: UpdateSource,
        models: UpdatedModels,
        options: ApplierOptions | None = None,
        *,
        records: RowStore | None = None,
    ) -> None:
        self.options = options or ApplierOptions()
        self.source = source
        self._models = models
        self._order = UpdateOrder(records)
        self._held: dict[_BatchPlace, RowBatch] = {}
        """Updates that must be applied together with later ones, which have not come yet."""
        self._num_assignments = 0
        self._totals = ApplierTotals()
        self._told: set[tuple[str, str, DropReason]] = set()
        self._is_failing = False
        self._failure: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="update applier", daemon=True)

    def start(self) -> None:
        """Begin to apply updates.

        Raises:
            RuntimeError: where it has begun before.
        """
        self._thread.start()

    def close(self) -> None:
        """End after the update in hand, commit nothing that was not applied, and close the source;
        a second call does nothing.

        Raises:
            RuntimeError: where the thread had ended by itself, by an error that is its cause.
        """
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.source.close()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeError(
                f"updates must go on until they are closed, and ended before: {failure!r}"
            ) from failure

    def statistics(self) -> ApplierStatistics:
        """The totals of now, from any thread. What was received is in the source's."""
        return self._totals.statistics(is_running=self._thread.is_alive())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._apply_next()
        except Exception as error:  # noqa: BLE001 - close() raises it
            _LOG.exception("no update is applied any more")
            self._failure = error

    def _apply_next(self) -> None:
        """Apply what has come, and commit it once all of it was applied."""
        updates: list[Update] = []
        self._until_done(
            lambda: updates.extend(self.source.poll(self.options.poll_timeout_seconds))
        )
        if self._apply_all(updates):
            lag = self.source.lag()
            if self._held and not updates and not lag.num_messages:
                # What they wait for is not there any more.
                waiting, self._held = self._held, {}
                if not self._apply_batches(waiting):
                    return
            if not self._held:
                self.source.commit()
            self._totals.lag = lag

    def _apply_all(self, updates: Sequence[Update]) -> bool:
        """Apply updates or drop them; False where that could not be done before the end."""
        if self.source.num_assignments != self._num_assignments:
            self._num_assignments = self.source.num_assignments
            self._order.forget()
        if not self._until_done(lambda: self._order.read(updates)):
            return False
        batches, self._held = self._held, {}
        for update in updates:
            if isinstance(update, DenseUpdate):
                # It was published behind the rows of its version.
                waiting = {p: b for p, b in batches.items() if not self._is_torn(b)}
                batches = {p: b for p, b in batches.items() if p not in waiting}
                if not self._apply_batches(waiting) or not self._apply_dense(update):
                    return False
                continue
            place = update.model, update.table, update.origin.partition
            if place not in batches and not self._order.is_torn(update):
                place = update.model, update.table, None
            batch = batches.get(place)
            if batch is not None and not batch.takes(update):
                if not self._apply_batches({place: batches.pop(place)}):
                    return False
                batch = None
            if not self._is_due(update):
                continue
            if batch is None:
                batch = batches[place] = RowBatch(update)
            else:
                batch.add(update)
            is_whole = place[2] is not None and not self._is_torn(batch)
            if is_whole and not self._apply_batches({place: batches.pop(place)}):
                return False
        self._held = {place: batch for place, batch in batches.items() if self._is_torn(batch)}
        return self._apply_batches({p: b for p, b in batches.items() if p not in self._held})

    def _is_torn(self, batch: RowBatch) -> bool:
        return any(map(self._order.is_torn, batch.last_updates()))

    def _apply_batches(self, batches: Mapping[_BatchPlace, RowBatch]) -> bool:
        return all(self._apply_batch(batch) for batch in batches.values())

    def _apply_batch(self, batch: RowBatch) -> bool:
        whole = batch.joined()
        return self._apply(
            batch.updates,
            lambda: self._models.apply_rows(
                whole.model,
                whole.table,
                whole.keys,
                whole.rows,
                version=whole.version,
                deleted_keys=whole.deleted_keys,
            ),
        )

    def _apply_dense(self, update: DenseUpdate) -> bool:
        return not self._is_due(update) or self._apply(
            [update],
            lambda: self._models.swap_dense(update.model, update.tensors, update.version),
        )

    def _is_due(self, update: Update) -> bool:
        """True for an update that is to be applied; another one is dropped."""
        reason = self._order.why_not(update)
        if reason is not None:
            self._drop(update, reason, f"version {update.version}, sequence {update.sequence}")
        return reason is None

    def _apply(self, updates: Sequence[Update], action: Callable[[], object]) -> bool:
        """Apply updates of one model and version by an action, leave them for later, or drop them;
        False where none of that could be done before the end."""

        def noted() -> None:
            self._order.note_begun(updates)
            action()
            self._order.note_applied(updates)

        # Asked first: what is loaded just after an attempt failed is not to be dropped.
        if self.source.give_back(updates[0]):
            return True
        try:
            is_done = self._until_done(noted)
        except (TypeError, ValueError, UnknownModelError) as error:
            if isinstance(error, UnknownModelError) and self.source.give_back(updates[0]):
                return True
            for update in updates:
                self._drop(update, _reason(error), error)
            return True
        for update in updates if is_done else ():
            self._totals.note_applied(update)
        return is_done

    def _until_done(self, action: Callable[[], object]) -> bool:
        """Try an action until it succeeds; False where it has not before the end."""
        wait = self.options.back_off_seconds
        while True:
            try:
                action()
            except (OSError, RuntimeError, MemoryError) as error:
                if not self._is_failing:
                    self._is_failing = True
                    _LOG.warning("updates wait, and are tried again: %r", error)
                self._totals.note_retry()
            else:
                if self._is_failing:
                    self._is_failing = False
                    _LOG.info("updates are applied again")
                return True
            if self._ending.wait(wait):
                return False
            wait = min(2 * wait, self.options.longest_back_off_seconds)

    def _drop(self, update: Update, reason: DropReason, detail: object) -> None:
        table = update.table if isinstance(update, RowUpdate) else ""
        told = update.model, table, reason
        if told not in self._told:
            self._told.add(told)
            # What was read again after a rebalance is no fault.
            level = logging.INFO if reason is DropReason.REPEATED else logging.WARNING
            what = f"table {table}" if table else "the dense part"
            _LOG.log(
                level,
                "dropped an update of %s of model %s (%s): %s; further ones are counted alone",
                what,
                update.model,
                reason.value,
                detail,
            )
        # Last, so that whoever sees the count finds the line in the log.
        self._totals.note_dropped(reason)


def _reason(error: Exception) -> DropReason:
    if isinstance(error, UnknownModelError):
        return DropReason.UNKNOWN
    return DropReason.OLD_VERSION if isinstance(error, OutdatedUpdateError) else DropReason.UNFIT
