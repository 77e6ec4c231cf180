"""A thread that applies the updates of a stream to the models that are served."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from torchembed.serving.interface import UnknownModelError
from torchembed.serving.updates.applier_statistics import (
    ApplierStatistics,
    ApplierTotals,
    DropReason,
)
from torchembed.serving.updates.row_batches import RowBatch
from torchembed.serving.updates.update_order import UpdateOrder
from torchembed.streams import DenseUpdate, RowUpdate, Update, UpdateSource

_LOG = logging.getLogger("torchembed.serving")


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
            OSError, RuntimeError: where it cannot be done now; calling again does no harm.
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

    What was applied is committed behind each poll, so that after a crash some updates are applied
    again, in the same order: the rows end up the same. Within one run an update that comes again,
    or is of an earlier version than what was applied, is dropped and counted; so is one of a model
    or table that is not served, or of other widths or tensors, of which the first of each table is
    logged. What waits for a table is written at once. Where the models' stores are away it tries on
    until they are back, and applies nothing else meanwhile. It is a context manager that starts and
    closes itself.

    Args:
        source: of the updates; it belongs to the applier, which closes it.
        models: that they are applied to, in a thread of the applier's.
    """

    def __init__(
        self, source: UpdateSource, models: UpdatedModels, options: ApplierOptions | None = None
    ) -> None:
        self.options = options or ApplierOptions()
        self.source = source
        self._models = models
        self._order = UpdateOrder()
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
            self.source.commit()
            self._totals.lag = self.source.lag()

    def _apply_all(self, updates: Sequence[Update]) -> bool:
        """Apply updates or drop them; False where that could not be done before the end."""
        batches: dict[tuple[str, str], RowBatch] = {}
        for update in updates:
            if isinstance(update, DenseUpdate):
                # It was published behind the rows of its version.
                waiting, batches = batches, {}
                if not self._apply_batches(waiting) or not self._apply_dense(update):
                    return False
                continue
            place = update.model, update.table
            batch = batches.get(place)
            if batch is not None and not batch.takes(update):
                if not self._apply_batches({place: batches.pop(place)}):
                    return False
                batch = None
            if not self._is_due(update):
                continue
            if batch is None:
                batches[place] = RowBatch(update)
            else:
                batch.add(update)
        return self._apply_batches(batches)

    def _apply_batches(self, batches: Mapping[tuple[str, str], RowBatch]) -> bool:
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
        """Apply updates by an action, or drop them; False where neither could be done before the
        end."""
        try:
            is_done = self._until_done(action)
        except (TypeError, ValueError, UnknownModelError) as error:
            is_unknown = isinstance(error, UnknownModelError)
            for update in updates:
                self._drop(update, DropReason.UNKNOWN if is_unknown else DropReason.UNFIT, error)
            return True
        for update in updates if is_done else ():
            self._order.note_applied(update)
            self._totals.note_applied(update)
        return is_done

    def _until_done(self, action: Callable[[], object]) -> bool:
        """Try an action until it succeeds; False where it has not before the end."""
        wait = self.options.back_off_seconds
        while True:
            try:
                action()
            except (OSError, RuntimeError) as error:
                self._totals.note_retry()
                if not self._is_failing:
                    self._is_failing = True
                    _LOG.warning("updates wait, and are tried again: %r", error)
            else:
                if self._is_failing:
                    self._is_failing = False
                    _LOG.info("updates are applied again")
                return True
            if self._ending.wait(wait):
                return False
            wait = min(2 * wait, self.options.longest_back_off_seconds)

    def _drop(self, update: Update, reason: DropReason, detail: object) -> None:
        self._totals.note_dropped(reason)
        table = update.table if isinstance(update, RowUpdate) else ""
        told = update.model, table, reason
        if told in self._told:
            return
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
