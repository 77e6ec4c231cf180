"""A module with dynamic tables beside arrays that note, for each id, what its tables must hold."""

from collections import Counter as Counts
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import torchembed
from tests.support.modelled_table import DIM, Bools, Floats, Held, Ints, ModelledTable
from torchembed import (
    LFU,
    LRU,
    CallerScores,
    DeltaMark,
    Dynamic,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EpochLFU,
    HostMemory,
    MinimumCount,
    Missing,
    SnapshotDueError,
    SparseFeatures,
)
from torchembed.tables import Normal, Table, row_chunks, write_rows
from torchembed.training import CheckpointFolder, TrainingRun

LR = 0.5  # so that its product with a small integer is exact
NAMES = ("a", "b")
_BUCKET = 128


class ModelledModule:
    """Two dynamic tables of one group, their optimizer, and what they must hold.

    Which new ids of a batch find places in full tables, and whose places, is read from the module;
    that those who went were not in use and had no greater scores than those who stay is checked,
    and all else is computed.

    Args:
        universe: all ids that come, int64, ascending.
        capacity: rows of each table.
        dynamic: the policies; ids that are too old go at once (``sweep_steps=1``).
        storage: where rows live; None for the device.
        make_optimizer: SGD, whose rows are computed, or Adagrad, whose sums are.
    """

    def __init__(
        self,
        universe: Ints,
        capacity: int,
        dynamic: Dynamic,
        make_optimizer: Callable[..., torchembed.optim.FusedOptimizer],
        device: torch.device,
        storage: HostMemory | None = None,
    ) -> None:
        assert dynamic.ttl_steps is None or dynamic.sweep_steps == 1
        self.universe, self.dynamic, self.device = universe, dynamic, device
        self._make_optimizer, self._storage = make_optimizer, storage
        self._is_sgd = make_optimizer is torchembed.optim.SGD
        threshold = dynamic.admission.threshold if dynamic.admission else 1
        initial = self._initial_rows()
        self.tables = [ModelledTable(rows, self._missing(rows), threshold) for rows in initial]
        self._begin(capacity)
        self.epoch = self.num_operations = 0

    def _begin(self, capacity: int) -> None:
        """Take a new module, without ids."""
        self.capacity = capacity
        self.module, self.optimizer = self._made(capacity, self.dynamic, self._storage)
        self.mark: DeltaMark | None = None
        self._log = self.dynamic.deletion_log * len(NAMES)

    def _made(
        self, capacity: int, dynamic: Dynamic, storage: HostMemory | None = None
    ) -> tuple[EmbeddingBagCollection, torchembed.optim.FusedOptimizer]:
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=capacity,
                embedding_dim=DIM,
                feature_names=(name,),
                initializer=Normal(),
                dynamic=dynamic,
                storage=storage,
            )
            for name in NAMES
        ]
        module = EmbeddingBagCollection(configs, device=self.device)
        return module, self._make_optimizer(module.parameters(), lr=LR)

    def _initial_rows(self) -> list[Floats]:
        """Rows that all ids get in tables that have room for all, for each table ``[U, DIM]``."""
        module, _ = self._made(4 * len(self.universe) + _BUCKET, Dynamic())
        everything = np.arange(len(self.universe))
        found = module(self._batch(everything, everything)).values().detach().cpu().numpy()
        return list(found.reshape(len(everything), len(NAMES), DIM).transpose(1, 0, 2).copy())

    def num_rows(self) -> list[int]:
        """The rows that each table has now."""
        return [_table_of(self.module, number).num_rows for number in range(len(NAMES))]

    def _missing(self, initial: Floats) -> Floats:
        """The vectors of ids without a row in the table of ``initial`` rows."""
        value = self.dynamic.missing_value
        if value is Missing.INITIAL:
            return initial
        constant = np.zeros(DIM) if isinstance(value, Missing) else np.array(value)
        return np.broadcast_to(constant.astype(np.float32), initial.shape)

    def _batch(self, *places: Ints) -> SparseFeatures:
        """A sample for each id of each table, by their places in the universe."""
        values = torch.from_numpy(self.universe[np.concatenate(places)]).to(self.device)
        return SparseFeatures(
            keys=NAMES, values=values, batch_size=len(places[0]), hotness=(1,) * len(NAMES)
        )

    def _vectors(self, *places: Ints) -> Tensor:
        return self.module(self._batch(*places)).values()

    def _looked_up(self, vectors: Tensor) -> Floats:
        """``[tables, B, DIM]``."""
        found = vectors.detach().cpu().numpy()
        return found.reshape(-1, len(NAMES), DIM).transpose(1, 0, 2)

    def evaluate(self, *places: Ints) -> None:
        """Nothing changes."""
        self.num_operations += len(places[0]) * len(NAMES)
        found = self._looked_up(self.module.eval()(self._batch(*places)).values())
        self.module.train()
        for table, vectors, of_table in zip(self.tables, found, places, strict=True):
            np.testing.assert_array_equal(vectors, table.vectors(of_table))

    def train(self, *places: Ints) -> None:
        """A step on the sum of the vectors."""
        self.num_operations += len(places[0]) * len(NAMES)
        before, num_rows = [table.held.copy() for table in self.tables], self.num_rows()
        vectors = self._vectors(*places)
        vectors.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.epoch += 1
        looked_up = self._looked_up(vectors)
        for number, (table, of_table) in enumerate(zip(self.tables, places, strict=True)):
            occurrences = np.bincount(of_table, minlength=len(self.universe))
            now = self._observed(number)
            if self.num_rows()[number] > num_rows[number]:  # it has grown before the batch
                table.move(now)
            self._admit(table, occurrences, before[number], now)
            np.testing.assert_array_equal(looked_up[number], table.vectors(of_table))
            self._update(table, occurrences, now)

    def _admit(self, table: ModelledTable, occurrences: Ints, before: Held, now: Held) -> None:
        """The changes by a batch of ``table.held``, which becomes the rows before the update."""
        held, epoch, counts = table.held, self.epoch, table.counts
        is_hit = held.is_held & (occurrences > 0)
        counts["hits"] += int(occurrences[is_hit].sum())
        counts["misses"] += int(occurrences[~is_hit].sum())
        held.touched[is_hit] = epoch
        held.scores[is_hit] = self._scores(table, held.scores[is_hit], occurrences[is_hit])
        if self.dynamic.ttl_steps is not None:
            newest = min(epoch - self.dynamic.ttl_steps, epoch - 2)
            table.remove(held.is_held & (held.touched <= newest), "evicted_expired", epoch)
        is_new = (occurrences > 0) & ~is_hit
        table.waiting[is_new] += occurrences[is_new]
        is_wanted = is_new & (table.waiting >= table.threshold)
        is_inserted = is_new & now.is_held
        assert not (is_inserted & ~is_wanted).any()
        is_evicted = held.is_held & ~now.is_held
        none = np.zeros_like(occurrences)
        if isinstance(self.dynamic.eviction, CallerScores):
            none += self.dynamic.eviction.initial_score
        first_scores = self._scores(table, none, occurrences)
        if isinstance(self.dynamic.eviction, LFU) and self.dynamic.admission is not None:
            first_scores = table.waiting.copy()
        self._check_victims(table, is_evicted, first_scores[is_wanted & ~is_inserted])
        counts["refused"] += int((is_wanted & ~is_inserted).sum())
        table.remove(is_evicted, "evicted_full", epoch)
        counts["inserted"] += int(is_inserted.sum())
        table.waiting[is_inserted] = 0
        held.slots[is_inserted] = now.slots[is_inserted]
        held.rows[is_inserted] = table.initial[is_inserted]
        held.touched[is_inserted] = epoch
        held.scores[is_inserted] = first_scores[is_inserted]

    def _check_victims(self, table: ModelledTable, is_evicted: Bools, refused_scores: Ints) -> None:
        """Ids in use stay. In a table of one bucket, the least scores go; and ids are refused where
        there are no lesser ones than theirs."""
        held, released = table.held, self.epoch - 2
        assert (held.touched[is_evicted] <= released).all()
        if self.capacity > _BUCKET:
            return
        may_go = held.scores[held.is_held & ~is_evicted & (held.touched <= released)]
        if len(may_go) and is_evicted.any():
            assert held.scores[is_evicted].max() <= may_go.min()
        if len(may_go) and len(refused_scores):
            assert refused_scores.max() < may_go.min()

    def _scores(self, table: ModelledTable, scores: Ints, occurrences: Ints) -> Ints:
        """The scores of ids that a batch has used, which had ``scores``."""
        eviction = self.dynamic.eviction
        if isinstance(eviction, CallerScores):
            return scores if table.step_score is None else np.full_like(scores, table.step_score)
        if isinstance(eviction, LRU):
            return np.full_like(scores, self.epoch)
        if isinstance(eviction, EpochLFU):
            count = (scores & (2**32 - 1)) + occurrences
            return self.epoch // eviction.steps_per_epoch << 32 | count
        return scores + occurrences

    def _update(self, table: ModelledTable, occurrences: Ints, now: Held) -> None:
        held = table.held
        is_trained = held.is_held & (occurrences > 0)
        gradients = occurrences[is_trained, None].astype(np.float32)
        if self._is_sgd:
            held.rows[is_trained] -= np.float32(LR) * gradients
        else:
            held.sums[is_trained] += gradients * gradients
            held.rows[is_trained] = now.rows[is_trained]

    def evict(self, number: int, max_rows: int) -> None:
        """Those of least score go, of equal ones the longest unused."""
        self.num_operations += 1
        table = self.tables[number]
        self.module.evict(max_rows=max_rows, table=NAMES[number])
        may_go = np.flatnonzero(table.held.is_held & (table.held.touched <= self.epoch - 1))
        held = table.held
        order = np.lexsort((held.slots[may_go], held.touched[may_go], held.scores[may_go]))
        num_going = max(int(held.is_held.sum()) - max_rows, 0)
        table.remove(self._at(may_go[order[:num_going]]), "evicted_target", self.epoch)

    def erase(self, number: int, places: Ints) -> None:
        self.num_operations += len(places)
        table = self.tables[number]
        ids = torch.from_numpy(self.universe[places])
        self.module.erase(ids, table=NAMES[number])
        which = self._at(places) & table.held.is_held & (table.held.touched <= self.epoch - 1)
        table.remove(which, "erased", self.epoch)

    def set_score(self, number: int, score: int | None) -> None:
        self.num_operations += 1
        self.module.set_score(score, table=NAMES[number])
        self.tables[number].step_score = score

    def assign_scores(self, number: int, places: Ints, scores: Ints) -> None:
        """Give ids scores; the greatest of several for one id holds."""
        self.num_operations += len(places)
        ids, held = torch.from_numpy(self.universe[places]), self.tables[number].held
        self.module.assign_scores(ids, torch.from_numpy(scores), table=NAMES[number])
        greatest = np.full_like(held.scores, np.iinfo(np.int64).min)
        np.maximum.at(greatest, places, scores)
        which = self._at(places) & held.is_held
        held.scores[which] = greatest[which]

    def _at(self, places: Ints) -> Bools:
        which = np.zeros(len(self.universe), np.bool_)
        which[places] = True
        return which

    def follow(self) -> None:
        """Apply a delta to the copy, a snapshot where one is due."""
        self.num_operations += 1
        is_due = self.mark is None or sum(table.num_gone for table in self.tables) > self._log
        if self.mark is not None and is_due:
            with pytest.raises(SnapshotDueError):
                self.module.delta(since=self.mark)
        delta = self.module.delta(since=None if is_due else self.mark)
        for name, table in zip(NAMES, self.tables, strict=True):
            changes, copied = delta.tables[name], table.copied
            if is_due:
                copied.clear(copied.is_held)
            copied.clear(self._at(self._places(changes.deleted_ids)))
            places = self._places(changes.ids)
            copied.slots[places] = 0
            copied.rows[places] = changes.rows.numpy()
            np.testing.assert_array_equal(copied.is_held, table.held.is_held)
            np.testing.assert_array_equal(copied.rows, table.held.rows)
            table.num_gone = 0
        self.mark = delta.mark

    def _places(self, ids: Tensor) -> Ints:
        places = np.searchsorted(self.universe, ids.cpu().numpy())
        np.testing.assert_array_equal(self.universe[places], ids.cpu().numpy())
        return places

    def reload(self, places: Ints) -> None:
        """Go on with a module that has trained other ids, and then took the state dicts."""
        self._take_up(lambda: self._load_state_dicts(places))

    def _load_state_dicts(self, places: Ints) -> None:
        states = self.module.state_dict(), self.optimizer.state_dict()
        self._begin(self.capacity)
        self._vectors(places, places).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.module.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        # Of a table that is loaded the clock goes on behind both.
        self.epoch = max(self.epoch, 1)

    def restore(self, folder: Path) -> None:
        """Go on with a new module, from a checkpoint of this one."""
        self._take_up(lambda: self._load_checkpoint(folder))

    def _load_checkpoint(self, folder: Path) -> None:
        # Of its own: after a move to another module the epoch may be less than at an earlier one.
        checkpoints = CheckpointFolder(folder / str(self.num_operations))
        checkpoints.save(self.epoch, TrainingRun(model=self.module, optimizers=[self.optimizer]))
        self._begin(self.capacity)
        run = TrainingRun(model=self.module, optimizers=[self.optimizer])
        assert checkpoints.load(run) == self.epoch
        checkpoints.close()

    def _take_up(self, load: Callable[[], None]) -> None:
        """After ``load`` a mark of before is of no use, and all else as it was."""
        self.num_operations += 1
        mark = self.mark
        load()
        if self.dynamic.initial_capacity is not None:
            for number, table in enumerate(self.tables):
                table.move(self._observed(number))
        if mark is not None:
            with pytest.raises(SnapshotDueError):
                self.module.delta(since=mark)

    def move(self, capacity: int, max_bytes: int) -> None:
        """Go on with a new module of another capacity, which takes the rows by their ids: all that
        find a place, the greatest scores."""
        self.num_operations += 1
        old = self.module
        self._begin(capacity)
        self.epoch = max(int(table.held.touched.max()) for table in self.tables)
        for number, table in enumerate(self.tables):
            left_out = sum(
                write_rows(_table_of(self.module, number), chunk)
                for chunk in row_chunks(_table_of(old, number), max_bytes)
            )
            held, now = table.held, self._observed(number)
            is_gone = held.is_held & ~now.is_held
            assert left_out == is_gone.sum()
            if capacity <= _BUCKET and left_out:
                assert now.is_held.sum() == capacity
                assert held.scores[is_gone].max() <= held.scores[now.is_held].min()
            held.clear(is_gone)
            held.slots[now.is_held] = now.slots[now.is_held]
            table.waiting[:] = 0
            table.step_score = None
            self._adopt_counts(number)

    def _adopt_counts(self, number: int) -> None:
        """Go on from the counts of a new table, into which rows were written."""
        table, found = self.tables[number], self.module.statistics(wait=True)[NAMES[number]]
        table.counts = Counts(
            {name: getattr(found, name) for name in _COUNTED if getattr(found, name)}
        )

    def _observed(self, number: int) -> Held:
        """The contents of the table."""
        held, table = Held.none(len(self.universe)), _table_of(self.module, number)
        contents = table.index_contents()
        slots = contents["digests"].nonzero().flatten()
        places = self._places(contents["ids"][slots])
        assert np.bincount(places).max(initial=0) <= 1
        held.slots[places] = slots.cpu().numpy()
        table.group.write_back()
        stored = slots.to(table.parameter.device)
        held.rows[places] = table.parameter.detach()[stored].cpu().numpy()
        held.touched[places] = contents["touched"][slots].cpu().numpy()
        scores = contents.get("scores", contents["touched"])
        held.scores[places] = scores[slots].cpu().numpy()
        if not self._is_sgd:
            (sums,) = table.group.stored_states
            held.sums[places] = table.group.table_rows(sums, table)[stored].cpu().numpy()
        return held

    def check(self) -> None:
        """The tables hold what they must, and counted what happened."""
        statistics = self.module.statistics(wait=True)
        for number, table in enumerate(self.tables):
            self._observed(number).assert_equals(table.held)
            found = statistics[NAMES[number]]
            assert found.size == table.held.is_held.sum()
            assert found.size == found.inserted - found.evicted - found.erased
            assert {name: getattr(found, name) for name in _COUNTED} == {
                name: table.counts[name] for name in _COUNTED
            }
            assert found.epoch == self.epoch


_COUNTED: Sequence[str] = (
    "hits",
    "misses",
    "inserted",
    "refused",
    "evicted_full",
    "evicted_expired",
    "evicted_target",
    "erased",
    "evicted_age",
)


def _table_of(module: EmbeddingBagCollection, number: int) -> Table:
    return module.table_set.tables[number]


def admission_of(threshold: int, universe: Ints) -> MinimumCount | None:
    """Exact counts with room for all ids; none for a threshold of 1."""
    return None if threshold == 1 else MinimumCount(threshold, capacity=4 * len(universe))
