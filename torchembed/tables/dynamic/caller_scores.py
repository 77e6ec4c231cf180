"""Scores of the caller for the ids that batches use."""

from typing import Self

import torch
from torch import Tensor

from torchembed.tables.dynamic.policies import CallerScores, Dynamic


class StepScores:
    """The score that a batch gives to the ids that it uses, for each table of a group.

    Where a table has none, ids keep their scores, and new ones get ``initial``.

    Args:
        num_tables: of the group.
        initial: the score of new ids of tables without a step score.
        device: of the tables.
    """

    def __init__(self, num_tables: int, initial: int, device: torch.device) -> None:
        self._initial = initial
        self._numbers = torch.zeros(num_tables, 2, dtype=torch.int64, device=device)
        """For each table the score, and 1 where there is one."""

    @classmethod
    def under(cls, dynamic: Dynamic, num_tables: int, device: torch.device) -> Self | None:
        """The scores of a group by the policies of its tables; None but under
        :class:`CallerScores`."""
        if not isinstance(dynamic.eviction, CallerScores):
            return None
        return cls(num_tables, dynamic.eviction.initial_score, device)

    def set(self, table: int, score: int | None) -> None:
        """Let batches from now on give ``score`` to their ids of a table; None: no score. Never
        waits for a GPU."""
        self._numbers[table, 0].fill_(0 if score is None else score)
        self._numbers[table, 1].fill_(int(score is not None))

    def of_table(self, table: int) -> Tensor:
        """int64 ``[2]``, a view: the score of a table, and 1 where there is one."""
        return self._numbers[table]

    def of_ids(self, slots: Tensor, tables: Tensor, scores: Tensor) -> Tensor:
        """The scores of ids once the batch has used them, int64 ``[L]``.

        Args:
            slots: int64 ``[L]``, -1 for ids that have none.
            tables: int32 ``[L]``; any score comes of -1.
            scores: int64 ``[S]``, of the slots before.
        """
        of_step, is_set = self._numbers[tables.long()].unbind(1)
        kept = scores[slots.clamp_min(0)].masked_fill(slots < 0, self._initial)
        return torch.where(is_set > 0, of_step, kept)
