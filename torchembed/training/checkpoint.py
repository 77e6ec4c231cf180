"""Saving and loading a model and its optimizers with ``torch.distributed.checkpoint``.

A checkpoint holds whole tensors under their names in the model, in pieces that each rank writes and
reads for itself: of a sharded table, the rank's own rows. So it does not depend on how tables were
sharded, and other programs that read such checkpoints see ordinary tensors.
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from torchembed.optim.fused import FusedOptimizer
from torchembed.tables import Table, table_of
from torchembed.training import ranks


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> None:
    """Write the state of ``model`` and ``optimizers`` into the folder ``path``.

    Every rank must call it; all ranks must see the same folder. A checkpoint that stands there is
    replaced once the new one is complete.
    """
    state = _model_state(model)
    for index, optimizer in enumerate(optimizers):
        state |= _optimizer_state(model, optimizer, f"optimizers.{index}")
    partial = path.with_name(f"{path.name}.partial")
    if ranks.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    ranks.wait_for_all()
    with _one_process_is_fine():
        save(
            state,
            checkpoint_id=partial,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    _replace(partial, path)


def _replace(partial: Path, path: Path) -> None:
    """Give ``partial`` the name ``path``, on rank 0; the others wait."""
    if ranks.rank() == 0:
        replaced = path.with_name(f"{path.name}.replaced")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        partial.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    ranks.wait_for_all()


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> None:
    """Read what :func:`save_checkpoint` wrote into ``model`` and ``optimizers``, in place.

    The number of ranks and the placement of tables may differ from those that saved. Every rank
    must call it. A checkpoint is unpickled in part: load only what you trust.

    Raises:
        FileNotFoundError: where ``path`` holds no checkpoint.
        ValueError: where it lacks something, or shapes differ; nothing is changed then.
    """
    if not (path / ".metadata").is_file():
        raise FileNotFoundError(f"{path} holds no checkpoint: there is no file {path}/.metadata")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    state = _model_state(model)
    for index, optimizer in enumerate(optimizers):
        state |= _room_for_optimizer(model, optimizer, f"optimizers.{index}", saved)
    for key, value in state.items():
        _check_saved(path, key, value, saved)
    with _one_process_is_fine():
        load(
            state,
            checkpoint_id=path,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    for index, optimizer in enumerate(optimizers):
        _load_optimizer(model, optimizer, f"optimizers.{index}", state)


def _model_state(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer, by reference."""
    return {f"model.{name}": value for name, value in model.state_dict().items()}


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


def _has_rows(
    optimizer: torch.optim.Optimizer, name: str, shape: torch.Size, parameter_shape: torch.Size
) -> bool:
    """Whether state ``name`` of a table has a row for each row of the table."""
    if isinstance(optimizer, FusedOptimizer):
        return name in optimizer.state_names
    return shape == parameter_shape


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str
) -> dict[str, Any]:
    saved = optimizer.state_dict()
    state: dict[str, Any] = {
        f"{prefix}.param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in saved["param_groups"]
        ]
    }
    for number, (name, parameter) in enumerate(_named_parameters(model, optimizer)):
        table = table_of(parameter)
        for key, value in saved["state"].get(number, {}).items():
            if table is not None and isinstance(value, Tensor):
                rows = _has_rows(optimizer, key, value.shape, parameter.shape)
                value = table.as_global(value) if rows else value
            state[f"{prefix}.state.{name}.{key}"] = value
    return state


def _room_for_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str, saved: dict[str, Any]
) -> dict[str, Any]:
    """Room for all that is saved of this rank's parameters: most optimizers make their state at
    their first step, so they cannot say yet what there is."""
    room: dict[str, Any] = {f"{prefix}.param_groups": None}
    for name, parameter in _named_parameters(model, optimizer):
        start = f"{prefix}.state.{name}."
        for key, entry in saved.items():
            if not key.startswith(start):
                continue
            room[key] = None
            if isinstance(entry, TensorStorageMetadata):
                room[key] = _room_for_state(
                    optimizer, key.removeprefix(start), entry, table_of(parameter)
                )
    return room


def _room_for_state(
    optimizer: torch.optim.Optimizer, name: str, entry: TensorStorageMetadata, table: Table | None
) -> Tensor:
    dtype = entry.properties.dtype
    if table is not None:
        whole = torch.Size((table.spec.num_rows, table.spec.dim))
        if _has_rows(optimizer, name, entry.size, whole):
            shape = table.local_shape(entry.size)
            return table.as_global(torch.empty(shape, dtype=dtype, device=table.parameter.device))
    return torch.empty(entry.size, dtype=dtype)


def _check_saved(path: Path, key: str, value: Any, saved: dict[str, Any]) -> None:
    if key not in saved:
        raise ValueError(f"checkpoint {path} has no {key}; was it saved from another model?")
    entry = saved[key]
    if not isinstance(value, Tensor) or not isinstance(entry, TensorStorageMetadata):
        return
    if tuple(entry.size) != tuple(value.shape):
        raise ValueError(
            f"{key} must have shape {list(value.shape)} as in the model, got {list(entry.size)} "
            f"from checkpoint {path}"
        )


def _load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str, state: dict[str, Any]
) -> None:
    entries: dict[int, dict[str, Any]] = {}
    for number, (name, _) in enumerate(_named_parameters(model, optimizer)):
        start = f"{prefix}.state.{name}."
        entry = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
        if entry:
            entries[number] = {
                k: v.to_local() if isinstance(v, DTensor) else v for k, v in entry.items()
            }
    groups = optimizer.state_dict()["param_groups"]
    loaded = state[f"{prefix}.param_groups"]
    if len(loaded) != len(groups):
        raise ValueError(
            f"{prefix} must have {len(groups)} parameter groups as the optimizer has, got "
            f"{len(loaded)} from the checkpoint"
        )
    merged = [{**new, "params": own["params"]} for new, own in zip(loaded, groups, strict=True)]
    optimizer.load_state_dict({"state": entries, "param_groups": merged})


@contextlib.contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without a process group torch warns that it saves and loads in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
