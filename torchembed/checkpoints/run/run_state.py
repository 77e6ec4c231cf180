"""The state of a training run as named tensors, and back.

A checkpoint holds whole tensors under their names in the model. Each rank writes and reads its own
shard of them, for a sharded table its own rows. So a checkpoint does not depend on how tables were
sharded, and other programs that read it see ordinary tensors.
"""

import copy
import io
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchembed.checkpoints.run.disk_tables import disk_tables, load_disk_tables
from torchembed.checkpoints.run.moved_tables import MovedTable, moved_tables, restart_clocks
from torchembed.checkpoints.run.random_state import random_state, set_random_state
from torchembed.checkpoints.run.run_databases import RunDatabases
from torchembed.checkpoints.run.run_tables import run_tables
from torchembed.checkpoints.run.saved_state import SavedState, agree_on, mismatches, unexpected
from torchembed.checkpoints.run.table_form import TableForm, form_key
from torchembed.checkpoints.run.training_run import TrainingRun
from torchembed.core import ranks
from torchembed.core.ranks.collective_errors import raise_on_all_ranks
from torchembed.core.ranks.cpu_group import CpuGroup
from torchembed.modules.table_module import TableModule
from torchembed.optim.fused import FusedOptimizer
from torchembed.tables import meta_rows_in_state_dicts, table_of

_OPTIMIZER_KEY = re.compile(r"optimizers\.\d+")
"""Entry of a checkpoint that holds an optimizer's kind and parameter groups."""


def state_of(run: TrainingRun, databases: RunDatabases) -> dict[str, object]:
    """This rank's part of the run's state, with that of its random generators, but for what is in
    ``databases``.

    Parameters and optimizer state are the run's own tensors, not copies.
    """
    state = _model_state(run.model) | _table_forms(run.model)
    for index, optimizer in enumerate(run.optimizers):
        prefix = f"optimizers.{index}"
        kind, package = _kind_of(optimizer)
        groups = _groups(optimizer)
        state[prefix] = _packed({"kind": kind, "package": package, "param_groups": groups})
        state |= _optimizer_state(run.model, optimizer, prefix)
    of_rank = {
        "others": {name: other.state_dict() for name, other in run.others.items()},
        "random": random_state(),
    }
    state[f"ranks.{ranks.rank()}"] = _packed(of_rank)
    in_memory = {key: value for key, value in state.items() if not databases.hold(key)}
    return {**in_memory, **databases.entries}


def check_agreement(step: int, run: TrainingRun, group: CpuGroup, what: str) -> None:
    """Raise ``ValueError`` where not all ranks save the same step and kinds of optimizers."""
    kinds = [_kind_text(*_kind_of(optimizer)) for optimizer in run.optimizers]
    of_ranks = group.gather((step, kinds), what)
    for rank, (its_step, its_kinds) in enumerate(of_ranks):
        if (its_step, its_kinds) != of_ranks[0]:
            raise ValueError(
                f"step and optimizers must be the same on every rank, got {of_ranks[0][0]} and "
                f"{of_ranks[0][1]} on rank 0, {its_step} and {its_kinds} on rank {rank}; an "
                'optimizer without parameters on a rank takes [{"params": []}]'
            )


def load_state(run: TrainingRun, saved: SavedState) -> dict[str, int]:
    """Read ``saved`` into ``run``, in place. Collective.

    What belongs to a rank comes back to it where as many ranks load as saved. Otherwise ``others``
    take what rank 0 saved, and random generators stay as they are. They also do where the run has
    neither optimizers nor others: such a run does not go on training.

    Returns:
        By table, how many ids of a dynamic one found no row on any rank, since those of greater
        scores filled it; without those that lack none.

    Raises:
        ValueError: if names, shapes, dtypes, policies or kinds differ, all of them named;
            nothing is changed then.
    """
    what, group = saved.what, saved.group
    state = raise_on_all_ranks(lambda: _load_targets(run, saved.entries), what, group)
    tables = raise_on_all_ranks(lambda: list(run_tables(run, saved)), what, group)
    moved, on_disk = moved_tables(tables), disk_tables(tables)
    apart = [*moved, *on_disk]
    state = {k: v for k, v in state.items() if not any(table.holds(k) for table in apart)}
    of_apart = [key for key in saved.entries if any(table.holds(key) for table in apart)]
    of_optimizers = [f"optimizers.{index}" for index in range(len(run.optimizers))]
    found = raise_on_all_ranks(
        lambda: [
            *(f"{key} was not saved" for key in of_optimizers if key not in saved.entries),
            *_unexpected_optimizers(of_optimizers, saved),
            *(reason for key, value in state.items() for reason in mismatches(key, value, saved)),
            *(reason for table in apart for reason in table.mismatches(saved)),
            *(
                f"{key} is of a table on disk, and of none in the run"
                for key in state
                if key in saved.tensors.databases
            ),
        ],
        what,
        group,
    )
    agree_on([*found, *unexpected([*state, *of_apart], saved)], saved)
    raise_on_all_ranks(
        lambda: saved.tensors.databases.check(
            (table.part() for table in on_disk), (table.weight for table in moved)
        ),
        what,
        group,
    )
    # What is pickled is read first, since it may show that optimizers differ: nothing of the run is
    # changed before all ranks agree that everything fits.
    same_ranks = saved.num_ranks == ranks.world_size()
    rank_key = _rank_key(saved)
    unpacked = _read_packed([*of_optimizers, rank_key], saved)
    optimizers = [
        (key, own, unpacked[key]) for key, own in zip(of_optimizers, run.optimizers, strict=True)
    ]
    others = unpacked[rank_key]["others"]
    agree_on(
        [
            *(mismatch for named in optimizers for mismatch in _compare_optimizer(*named)),
            *_not_saved(run.others, others),
        ],
        saved,
    )

    growing = [table for table in moved if table.num_rows is not None]

    def grown() -> tuple[dict[str, object], list[MovedTable]]:
        """The targets, and the tables that are loaded by id, once others have grown."""
        if not growing:
            return state, moved
        for table in growing:
            table.grow()
        by_id = [table for table in moved if table.num_rows is None]
        targets, left = _load_targets(run, saved.entries), [*by_id, *on_disk]
        return {k: v for k, v in targets.items() if not any(t.holds(k) for t in left)}, by_id

    state, moved = raise_on_all_ranks(grown, what, group)
    saved.read(state)
    left_out: dict[str, int] = {}

    def apply() -> None:
        # It empties databases whose rows are then loaded by id.
        load_disk_tables(run.model, on_disk, saved)
        restart_clocks(moved)
        for table in moved:
            left_out[table.names[0]] = table.load(saved)
        for name, module in run.model.named_modules():
            key = ".".join(filter(None, ("model", name, "_extra_state")))
            if key in state:
                module.set_extra_state(state[key])
            if isinstance(module, TableModule):
                module.note_loaded()
        for key, own, loaded in optimizers:
            in_place = {
                of_state: value
                for of_state, value in _optimizer_state(run.model, own, key).items()
                if any(table.holds(of_state) for table in [*moved, *on_disk])
            }
            _load_optimizer(run.model, own, key, loaded["param_groups"], state | in_place)
        for name, other in run.others.items():
            other.load_state_dict(others[name])
        if same_ranks and (run.optimizers or run.others):
            set_random_state(unpacked[rank_key]["random"])

    raise_on_all_ranks(apply, what, group)
    totals: dict[str, int] = {}
    for of_rank in group.gather(left_out, what):
        for name, number in of_rank.items():
            totals[name] = totals.get(name, 0) + number
    return {name: number for name, number in totals.items() if number}


def load_others(others: Mapping[str, Stateful], saved: SavedState) -> None:
    """Read what ``others`` of this rank saved, of rank 0 where other ranks saved it, in place.
    Collective.

    Raises:
        ValueError: if one was not saved; nothing is changed then.
    """
    rank_key = _rank_key(saved)
    loaded = _read_packed([rank_key], saved)[rank_key]["others"]
    agree_on(list(_not_saved(others, loaded)), saved)

    def apply() -> None:
        for name, other in others.items():
            other.load_state_dict(loaded[name])

    raise_on_all_ranks(apply, saved.what, saved.group)


def _rank_key(saved: SavedState) -> str:
    """Entry of what belongs to this rank, or where other ranks saved it to rank 0."""
    return f"ranks.{ranks.rank() if saved.num_ranks == ranks.world_size() else 0}"


def _read_packed(keys: Iterable[str], saved: SavedState) -> dict[str, Any]:
    """The objects of entries that are pickled. Collective."""
    packed = {key: _empty_packed(saved.entries[key]) for key in keys}
    saved.read(dict(packed))
    return raise_on_all_ranks(
        lambda: {key: _unpacked(value) for key, value in packed.items()}, saved.what, saved.group
    )


def _not_saved(others: Iterable[str], saved: Container[str]) -> Iterator[str]:
    return (f"others {name!r} was not saved" for name in others if name not in saved)


def on_cpu(state: dict[str, object]) -> dict[str, object]:
    """A copy of a state, its tensors on the CPU, that later training steps do not change."""
    return {
        key: value.detach().to("cpu", copy=True)
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _model_state(model: nn.Module) -> dict[str, object]:
    """Every parameter and buffer by its name in a checkpoint; not copies."""
    with meta_rows_in_state_dicts():
        return {f"model.{name}": value for name, value in model.state_dict().items()}


def _table_forms(model: nn.Module) -> dict[str, object]:
    """The form of each dynamic table that this rank holds a part of."""
    forms = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        table = table_of(parameter)
        form = None if table is None else TableForm.of(table)
        if form is not None:
            forms[form_key(name)] = form.to_tensor()
    return forms


def _packed(state: object) -> Tensor:
    """``state``, pickled as it now is, as a uint8 tensor."""
    # Pickled at once: the objects may change while a thread still writes the checkpoint.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _empty_packed(entry: STORAGE_TYPES) -> Tensor:
    """Memory to read a packed state into."""
    assert isinstance(entry, TensorStorageMetadata)
    return torch.empty(entry.size, dtype=torch.uint8)


def _unpacked(tensor: Tensor) -> dict[str, Any]:
    buffer = io.BytesIO(tensor.numpy().tobytes())
    return torch.load(buffer, map_location="cpu", weights_only=False)


def _named_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's parameters in order, with their names in ``model``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    "optimizers must hold parameters of the model alone, got one of shape "
                    f"{list(parameter.shape)} that is not the model's"
                )
            yield name, parameter


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, where rows on disk are on the meta device."""
    with meta_rows_in_state_dicts():
        return optimizer.state_dict()


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    groups = _state_dict(optimizer)["param_groups"]
    return [{k: value for k, value in group.items() if k != "params"} for group in groups]


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str
) -> dict[str, object]:
    """The optimizer's state tensors that exist, not copied, by name; most optimizers make them at
    their first step."""
    state = {}
    entries = _state_dict(optimizer)["state"]
    for number, (name, parameter) in enumerate(_named_parameters(model, optimizer)):
        for key, value in entries.get(number, {}).items():
            table = table_of(parameter)
            # State with a row for each row of the table is saved whole, like the table, so that it
            # can be loaded under another placement.
            if table is not None and _has_rows(optimizer, key, value, parameter):
                value = table.as_global(value)
            state[f"{prefix}.state.{name}.{key}"] = value
    return state


def _has_rows(
    optimizer: torch.optim.Optimizer, name: str, value: object, parameter: Tensor
) -> bool:
    """True where state ``name`` of a table has a row for each row of the table."""
    if isinstance(optimizer, FusedOptimizer):
        return name in optimizer.state_names
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _load_targets(run: TrainingRun, saved: Mapping[str, STORAGE_TYPES]) -> dict[str, object]:
    """Values by name that reading ``saved`` fills or replaces on this rank: the run's own tensors,
    and new ones for optimizer state that was saved and is not there yet."""
    targets = _model_state(run.model)
    for index, optimizer in enumerate(run.optimizers):
        targets |= _optimizer_targets(run.model, optimizer, f"optimizers.{index}", saved)
    return targets


def _optimizer_targets(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    prefix: str,
    saved: Mapping[str, STORAGE_TYPES],
) -> dict[str, object]:
    """The optimizer's own state tensors, and new ones for what else was saved of this rank's
    parameters. State that torch's optimizers make at their first step may be missing in ``saved``.
    """
    is_fused = isinstance(optimizer, FusedOptimizer)
    state = _optimizer_state(model, optimizer, prefix)
    targets = {key: value for key, value in state.items() if is_fused or key in saved}
    for name, parameter in _named_parameters(model, optimizer):
        table = table_of(parameter)
        whole = parameter if table is None else table.as_global(parameter.detach())
        start = f"{prefix}.state.{name}."
        for key, entry in saved.items():
            if key in targets or not key.startswith(start):
                continue
            # None for what is no tensor: reading puts the object in its place.
            targets[key] = None
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                targets[key] = torch.empty(entry.size, dtype=dtype)
                if entry.size != whole.shape:
                    continue
                if table is not None:
                    local = torch.empty_like(parameter.detach(), dtype=dtype)
                    targets[key] = table.as_global(local)
                elif isinstance(parameter, DTensor):  # of fully_shard
                    targets[key] = torch.empty_like(parameter.detach(), dtype=dtype)
    return targets


def _unexpected_optimizers(keys: Sequence[str], saved: SavedState) -> Iterator[str]:
    """Optimizers that were saved and that a run with others lacks; one with none takes the model
    alone."""
    for key in saved.entries:
        if keys and _OPTIMIZER_KEY.fullmatch(key) and key not in keys:
            yield (
                f"{key} was saved and is not in the run (leave out all optimizers to load the "
                "model alone)"
            )


def _kind_of(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    """The name of an optimizer's class, and the package that it is from, since torch and torchembed
    have classes of one name."""
    kind = type(optimizer)
    return kind.__name__, kind.__module__.partition(".")[0]


def _kind_text(kind: str, package: str) -> str:
    return f"{kind} of {package}"


def _compare_optimizer(
    key: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> Iterator[str]:
    kind, package = _kind_of(optimizer)
    groups, saved_package = optimizer.param_groups, saved.get("package", package)
    # A script is a package of another name when it is imported.
    of_other = saved_package != package and "__main__" not in (saved_package, package)
    if saved["kind"] != kind or of_other:
        was, now = _kind_text(saved["kind"], saved_package), _kind_text(kind, package)
        yield f"{key} is {was}, and the run's is {now}"
    if len(saved["param_groups"]) != len(groups):
        num_saved = len(saved["param_groups"])
        yield f"{key} has {num_saved} parameter groups, and {len(groups)} in the run"


def _load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    prefix: str,
    loaded_groups: list[dict[str, object]],
    state: dict[str, object],
) -> None:
    entries: dict[int, dict[str, object]] = {}
    for number, (name, parameter) in enumerate(_named_parameters(model, optimizer)):
        start = f"{prefix}.state.{name}."
        is_divided = isinstance(parameter, DTensor)
        entry = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        if entry:
            entries[number] = {
                k: v.to_local() if isinstance(v, DTensor) and not is_divided else v
                for k, v in entry.items()
            }
    merged = []
    for loaded, own in zip(loaded_groups, _state_dict(optimizer)["param_groups"], strict=True):
        # Tensors were unpickled onto the CPU. Those in a group, such as learning rates, go to where
        # the optimizer has its own, since captured steps read them there.
        moved = {
            k: torch.as_tensor(v).to(own[k]) if isinstance(own.get(k), Tensor) else v
            for k, v in loaded.items()
        }
        merged.append({**moved, "params": own["params"]})
    with meta_rows_in_state_dicts():
        optimizer.load_state_dict({"state": entries, "param_groups": merged})
