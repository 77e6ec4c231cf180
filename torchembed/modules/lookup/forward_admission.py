"""Admission of ids by forwards themselves, where it was not done ahead of them."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchembed.modules.lookup.bad_ids import any_bad, collected_checks
from torchembed.modules.table_module import TableModule
from torchembed.tables import Admission, TableGroup

_is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)
_admitted_ahead: ContextVar[frozenset[TableGroup]] = ContextVar(
    "admitted_ahead", default=frozenset()
)
_skip: ContextVar[Tensor | None] = ContextVar("skip", default=None)


def admits_in_forward(module: nn.Module) -> bool:
    """True where forward of ``module`` now gives rows to new ids of dynamic tables: in training,
    where gradients are computed, and not in a trial."""
    return module.training and torch.is_grad_enabled() and not is_trial()


def is_trial() -> bool:
    """True within :func:`without_admission`."""
    return _is_trial.get()


def admission_in_forward(group: dist.ProcessGroup | None) -> Admission:
    """The batch of a forward that admits ids: no trained one where an id that its step has looked
    up so far is bad, on any rank, since the step is skipped then.

    Collective over ``group`` (None for one rank) where the step collects the checks of ids; never
    waits for a GPU.
    """
    checks, skip = collected_checks(), _skip.get()
    if checks:
        is_bad = any_bad(checks).float()
        if group is not None:
            dist.all_reduce(is_bad, dist.ReduceOp.MAX, group=group)
        skip = is_bad if skip is None else skip.maximum(is_bad)
    return Admission() if skip is None else Admission(is_trained=skip == 0)


@contextlib.contextmanager
def admitted_ahead(groups: Iterable[TableGroup]) -> Iterator[None]:
    """A context for forward of a batch whose ids were admitted to tables of ``groups`` before."""
    token = _admitted_ahead.set(_admitted_ahead.get().union(groups))
    try:
        yield
    finally:
        _admitted_ahead.reset(token)


def check_not_admitted_ahead(group: TableGroup) -> None:
    """Raise ``RuntimeError`` where a program of ``torch.compile`` is to admit ids to tables of
    ``group`` that were admitted before, which it does not know."""
    if group in _admitted_ahead.get():
        names = ", ".join(table.spec.name for table in group.tables)
        raise RuntimeError(
            f"dynamic tables {names} must not be looked up in a program of torch.compile where a "
            "TrainPipeline trains them, which gives ids their rows before forward, so that the "
            "program would do so once more; compile the modules that take the vectors, without "
            "the tables"
        )


@contextlib.contextmanager
def skipped_where(skip: Tensor | None) -> Iterator[None]:
    """A context for forward of a step that trains nothing where ``skip``, float32 ``[1]`` and the
    same on all ranks, is not zero: its forwards admit no ids then. None: nothing is known yet."""
    token = _skip.set(skip)
    try:
        yield
    finally:
        _skip.reset(token)


@contextlib.contextmanager
def without_admission() -> Iterator[None]:
    """A context for trials, in which forwards change no table: ids without rows are looked up as in
    evaluation."""
    token = _is_trial.set(True)
    try:
        yield
    finally:
        _is_trial.reset(token)


def forward_admissions(model: nn.Module) -> dict[str, int]:
    """For each module of ``model`` with dynamic tables how often its forwards admitted ids."""
    return {
        name: sum(group.num_forward_admissions for group in module.table_set.current_groups())
        for name, module in model.named_modules()
        if isinstance(module, TableModule) and module.admission_changes_tables
    }
