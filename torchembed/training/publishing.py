"""Publishes a model while it is trained, for servers that follow it."""

from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from torchembed.checkpoints import model_rows
from torchembed.checkpoints.exports.model_changes import (
    changes_since,
    current_marks,
    dynamic_tables,
)
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.modules.served_names import dense_tensors, table_names
from torchembed.streams import DeliveryError, UpdatePublisher
from torchembed.tables import DeltaMark, RowChunk, Table, TableDelta
from torchembed.training.published_ids import PublishedIds


class Published(NamedTuple):
    """The counts of what a call published from this rank."""

    is_whole: bool
    """True where it was all rows of all tables."""
    num_rows: int
    num_deletions: int


class _Changes(NamedTuple):
    rows: dict[str, Iterator[RowChunk]]
    """Of tables that are sent whole, by their weights."""
    deltas: dict[str, TableDelta]
    """Of dynamic tables that are not, likewise."""
    marks: dict[str, DeltaMark]
    """Of this moment, by the names of modules."""


class ModelPublisher:
    """Publishes the changes of a model to the servers that have it deployed.

    Of dynamic tables each call publishes the rows of ids that were inserted, used or trained since
    the call before, and the ids that have left; these tables need a ``deletion_log``. Of static
    tables nobody notes which rows were trained: they are published whole, by the first call and
    where ``whole`` asks for it. The dense part is in each call, whole. Tables and tensors have the
    names that :func:`torchembed.serving.models.deploy` gives them.

    A call is whole of itself where it is the first, where more ids have left than a
    ``deletion_log`` holds, where tables were loaded, and behind a ``DeliveryError``; servers are
    then told as well which of the ids published before are gone, for which the publisher holds 8 to
    16 bytes for each id of a dynamic table.

    Where the tables are spread over ranks each rank makes one and publishes its own rows, and
    rank 0 what all ranks have. It is a context manager that closes itself; one thread uses it.

    Args:
        model: as it was deployed, or inside ``DistributedDataParallel``.
        name: under which it was deployed.
        publisher: of this rank alone; or the brokers, ``host:port`` or several by commas, for one
            that :meth:`close` closes.
        is_deployed: True where servers have all rows as they are now, so that the first call
            publishes no more than what changes from here on. Making it is collective then.
        flush_timeout_seconds: how long a call waits for what the call before has sent.

    Raises:
        ConnectionError: if no broker answers in time.
        ValueError: if ``is_deployed``, as :meth:`publish`.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        publisher: UpdatePublisher | str,
        *,
        is_deployed: bool = False,
        flush_timeout_seconds: float = 30.0,
    ) -> None:
        whole = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._model, self.name = whole, name
        self._timeout_seconds = flush_timeout_seconds
        self._names = table_names(whole)
        # Ids of the dynamic tables whose rows this rank publishes.
        self._ids = {weight: PublishedIds() for weight in self._published_here()}
        self._marks: dict[str, DeltaMark] = {}
        self._is_whole_due, self._version = not is_deployed, 1
        if is_deployed:
            self._note_deployed()
        self._owns_publisher = isinstance(publisher, str)
        self._publisher = UpdatePublisher(publisher) if isinstance(publisher, str) else publisher

    @torch.no_grad()
    def publish(self, version: int, *, whole: bool = False) -> Published:
        """Publish what has changed since the last call; collective, between two steps. Waits until
        brokers have what that call sent, and for a GPU; what it sends is under way as it returns.

        Where it raises, call it again: what it was to publish is published then.

        Args:
            version: of the model, from 1 on; it must not go down, also where training begins anew
                from a checkpoint, since servers drop what is older than what they have.
            whole: publish all rows of all tables.

        Raises:
            ValueError: for a lesser version, a dynamic table without a ``deletion_log``, or a table
                whose columns are divided over ranks.
            TimeoutError: if brokers do not take messages in time.
            DeliveryError: if they refused messages for good; the next call is whole.
            RuntimeError: if one of these was raised on another rank.
        """
        what = f"publish version {version} of {self.name}"
        raise_on_all_ranks(lambda: self._settle(version), what)
        changes = self._changes(whole or self._is_whole_due)
        published = raise_on_all_ranks(lambda: self._send(changes, version), what)
        self._marks, self._is_whole_due, self._version = changes.marks, False, version
        return published

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Return once brokers have all that was published from this rank.

        Raises:
            TimeoutError: if they have not in time; what is left is sent on.
            DeliveryError: if they refused some of it for good; the next call of :meth:`publish`
                is whole.
        """
        try:
            self._publisher.flush(timeout_seconds)
        except DeliveryError:
            self._is_whole_due = True
            raise
        # Behind a refusal some deletions may be lost, until the whole tables are published.
        for ids in () if self._is_whole_due else self._ids.values():
            ids.confirm()

    def close(self) -> None:
        """Send what is left, and close the publisher where it was made of brokers.

        Raises:
            TimeoutError, DeliveryError: as :meth:`flush`.
        """
        if self._owns_publisher:
            self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _settle(self, version: int) -> None:
        """Wait for the last call's messages, so that no rank's come behind later ones of
        another."""
        if version < self._version:
            raise ValueError(
                f"version must be at least {self._version}, as published before, got {version}"
            )
        self.flush(self._timeout_seconds)

    def _published_here(self) -> dict[str, Table]:
        """The dynamic tables whose rows this rank publishes, by their weights."""
        tables = dynamic_tables(self._model)
        return {w: t for w, t in tables.items() if t.is_sharded or ranks.rank() == 0}

    def _note_deployed(self) -> None:
        """Take it that servers have what there is now; collective."""
        self._marks = current_marks(self._model)
        for weight in self._names:
            chunks = model_rows(self._model, weight, with_states=False)
            for chunk in chunks if weight in self._ids else ():
                self._ids[weight].add(chunk.keys)

    def _changes(self, is_whole: bool) -> _Changes:
        """Find what there is to publish; collective."""
        found = changes_since(self._model, self._marks, is_whole=is_whole)
        if found.is_whole:
            rows = {w: model_rows(self._model, w, with_states=False) for w in self._names}
            return _Changes(rows, {}, found.marks)
        here = self._published_here()
        deltas = {weight: delta for weight, delta in found.tables.items() if weight in here}
        return _Changes({}, deltas, found.marks)

    def _send(self, changes: _Changes, version: int) -> Published:
        """Hand changes to the publisher; this rank's part of them."""
        num_rows = num_deletions = 0
        try:
            for weight, chunks in changes.rows.items():
                keys = [self._send_rows(weight, c.keys, c.rows, version) for c in chunks]
                num_rows += sum(map(len, keys))
                num_deletions += self._send_gone(weight, keys, version)
            for weight, delta in changes.deltas.items():
                self._send_rows(weight, delta.ids, delta.rows, version, delta.deleted_ids)
                num_rows += len(delta.ids)
                num_deletions += len(delta.deleted_ids)
            if ranks.rank() == 0:
                dense = dense_tensors(self._model)
                self._publisher.publish_dense(self.name, dense, version=version)
        except DeliveryError:
            self._is_whole_due = True
            raise
        return Published(bool(changes.rows), num_rows, num_deletions)

    def _send_rows(
        self,
        weight: str,
        keys: Tensor,
        rows: Tensor,
        version: int,
        deleted_keys: Tensor | None = None,
    ) -> Tensor:
        """Send rows of a table, and ids that have left; the ids of the rows."""
        ids = self._ids.get(weight)
        if ids is not None:
            # Before they are sent, since some are under way where that fails.
            ids.add(keys)
            if deleted_keys is not None:
                ids.delete(deleted_keys)
        self._publisher.publish_rows(
            self.name, self._names[weight], keys, rows, version=version, deleted_keys=deleted_keys
        )
        return keys

    def _send_gone(self, weight: str, keys: list[Tensor], version: int) -> int:
        """Send those ids of a dynamic table as deleted that are gone, where ``keys`` are there; how
        many these are."""
        table = self._published_here().get(weight)
        if table is None:
            return 0
        none = torch.empty(0, dtype=torch.int64)
        gone = self._ids[weight].without(torch.cat([none, *keys]))
        if len(gone):
            rows = torch.empty(0, table.spec.dim)
            self._send_rows(weight, none, rows, version, gone)
        return len(gone)
