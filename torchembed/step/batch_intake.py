"""Batches as they are read: in the form in which they are trained, and which steps can do it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from torchembed.step.batches.layouts import Layouts
from torchembed.step.batches.padded_parts import PaddedParts
from torchembed.step.engines.engine_choice import EngineChoice
from torchembed.step.model_loss import LossFunction, convert_batch
from torchembed.step.stages import NO_KIND, Agreement, ReadBatch


class BatchIntake:
    """Takes batches in that were read, and has them copied to where they are trained.

    Args:
        model: what the steps train.
        loss_fn: the pipeline's.
        engines: of the steps.
        padding: parts of batches that are padded.
        max_layouts: the most layouts of fixed hotness that have captured steps at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        engines: EngineChoice,
        padding: PaddedParts,
        max_layouts: int,
    ) -> None:
        self._loss_fn, self._engines, self._padding = loss_fn, engines, padding
        self._layouts = Layouts(model, max_layouts)
        self._num_read = self._values_version = self._padding_changes = 0

    def take_in(self, item: Any) -> ReadBatch:
        """A batch that was read; the engine that is to train it may begin to copy it."""
        data = convert_batch(item, self._loss_fn)
        number, self._num_read = self._num_read, self._num_read + 1
        if not self._engines.captures:
            return ReadBatch(data, number, NO_KIND, lambda: Agreement(NO_KIND, 0))
        values = self._engines.values
        if values.version != self._values_version:
            self._values_version = values.version
            if values.outdated is not None:
                self._layouts.begin_anew(number)
        padded = self._padding.padded(data)
        form = data if padded is None else padded.form
        if self._padding.changes != self._padding_changes:
            self._padding_changes = self._padding.changes
            self._layouts.begin_anew(number, forget=True)
        if self._engines.hooks.are_there:
            # On all ranks, since that is what they then agree on.
            kinds, why = NO_KIND, self._engines.hooks.reason
        else:
            kinds = self._layouts.kinds_of(form, number)
            why = self._layouts.why_eager(form) if kinds == NO_KIND else None
        has_spare = padded is not None and padded.has_spare
        agree = self._layouts.start_agreement(data, kinds, has_spare=has_spare)
        batch = ReadBatch(data, number, kinds, agree, why, padded)
        self._engines.prefetch(batch)
        return batch

    def trained_eagerly(self, batch: ReadBatch) -> ReadBatch:
        """``batch``, which was taken in, to be trained eagerly, as hooks need it, on all ranks."""
        agree = functools.partial(_on_no_kind, batch.agree)
        why = self._engines.hooks.reason
        return dataclasses.replace(batch, kinds=NO_KIND, agree=agree, why=why)

    def begins_anew(self, now: ReadBatch) -> bool:
        """True where on any rank the layout of captured steps is another one from ``now`` on, so
        that engines are to begin anew; once for each change. Waits for the ranks to have read
        theirs."""
        since = now.agree().layouts_since
        if since <= self._layouts.begun:
            return False
        self._layouts.begun = since
        return True


def _on_no_kind(agree: Callable[[], Agreement]) -> Agreement:
    return agree()._replace(kinds=NO_KIND)
