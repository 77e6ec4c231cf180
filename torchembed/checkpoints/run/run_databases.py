"""The databases of the tables of a run that are on disk, saved as they are at one moment."""

import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from torchembed.checkpoints.files.database_files import put_database
from torchembed.checkpoints.files.storage import Storage
from torchembed.checkpoints.run.database_form import (
    DATABASES,
    DatabaseForm,
    DatabasePart,
    SavedDatabase,
    disk_groups,
    disk_names,
    to_tensor,
)
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.core import ranks
from torchembed.optim.fused import FusedOptimizer
from torchembed.tables import DiskGroup, table_of


class RunDatabases:
    """This rank's databases, as they are when the object is made, in folders beside them that share
    their files; removed with the object where :meth:`put` did not move them.

    Attributes:
        entries: what a checkpoint says of them, by name.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._folders: dict[str, Path] = {}
        self._discard = weakref.finalize(self, _remove, self._folders)
        saved = []
        for number, (group, form) in enumerate(_forms(run)):
            made = group.saved_lines()
            # The name begins as those of the rank's other files.
            name = None if made is None else f"__{ranks.rank()}_database_{number}"
            if name is not None and made is not None:
                self._folders[name] = made
            saved.append(SavedDatabase(name, form))
        key = f"{DATABASES}{ranks.rank()}"
        self.entries: Mapping[str, Tensor] = {key: to_tensor(saved)} if saved else {}
        parts = [part for database in saved for part in database.form.parts]
        self._held = {part.weight for part in parts}
        self._held |= {state for part in parts for state in part.states.values()}

    def hold(self, entry: str) -> bool:
        """True for an entry of the run's state that is in a database."""
        return entry in self._held

    def put(self, storage: Storage, path: str) -> None:
        """Move them into the folder ``path`` of a checkpoint.

        Raises:
            OSError: if files cannot be written.
        """
        while self._folders:
            name, folder = next(iter(self._folders.items()))
            put_database(storage, folder, f"{path}/{name}")
            del self._folders[name]

    def discard(self) -> None:
        """Remove those that were not moved."""
        self._discard()


def _forms(run: TrainingRun) -> Iterator[tuple[DiskGroup, DatabaseForm]]:
    tables = disk_names(run.model)
    names: dict[int, list[str]] = {}
    for name, table in tables.items():
        names.setdefault(id(table), []).append(name)
    states: dict[int, dict[str, str]] = {}
    for index, optimizer in enumerate(run.optimizers):
        if isinstance(optimizer, FusedOptimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    table = table_of(parameter)
                    if id(table) in names:
                        start = f"optimizers.{index}.state.{names[id(table)][0]}."
                        states[id(table)] = {n: f"{start}{n}" for n in optimizer.state_names}
    for group in disk_groups(run.model):
        parts = [
            DatabasePart.of(table, names[id(table)][0], states.get(id(table), {}))
            for table in group.tables
        ]
        yield group, DatabaseForm.of(group, parts)


def _remove(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
