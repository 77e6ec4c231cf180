"""Admission of ids by forwards themselves, where it was not done ahead of them."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn

from torchembed.modules.table_module import TableModule

_is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)


def admits_in_forward(module: nn.Module) -> bool:
    """True where forward of ``module`` now gives rows to new ids of dynamic tables: in training,
    where gradients are computed, and not in a trial."""
    return module.training and torch.is_grad_enabled() and not _is_trial.get()


@contextlib.contextmanager
def without_admission() -> Iterator[None]:
    """A context for trials, in which forwards change no table: ids without rows are looked up as
    zeros."""
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
