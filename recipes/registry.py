"""Every run by its name."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipes.ctr import frappe, made, ml1m
from recipes.data_folder import check_data
from recipes.dlrm_dcnv2 import config as dlrm
from recipes.dlrm_dcnv2.run import check as check_dlrm
from recipes.dlrm_dcnv2.run import run as run_dlrm
from recipes.dlrm_dcnv2.served import served as served_dlrm
from recipes.result import RankingResult, Result, Stopped, TasksResult
from recipes.sequences import candidates, encoders, interactions
from recipes.served_run import ServedRun
from recipes.tasks import ml1m as tasks_of_ml1m
from recipes.tasks import sines


class Recipe(NamedTuple):
    """A run of a model on data."""

    config: Callable[[str | Path | None], Any]
    """From the data's folder or file, or its URL, if one was named, to the full config, a frozen
    dataclass."""
    run: Callable[[Any, torch.device, Path], Result | RankingResult | TasksResult | Stopped]
    """Trains, on every rank, from the config, this rank's device and the output folder, which is
    empty or holds an earlier part of the run to go on with."""
    served: Callable[[Any, Path], ServedRun] | None = None
    """From the config and the output folder of a run to what servers answer from; None where none
    can."""
    check: Callable[[Any, int], object] | None = None
    """Raises ``FileNotFoundError`` or ``ValueError`` where the data of a config are not there, or
    that many ranks cannot train it. It reads no rows: each rank calls it before it joins the
    others."""

    @property
    def summary(self) -> str:
        """One line that names model and data."""
        return self.description.splitlines()[0]

    @property
    def description(self) -> str:
        """Model and data, and the files that are read."""
        return inspect.cleandoc(self.config.__doc__ or "")


_CHECK_FRAPPE = partial(check_data, frappe.FILES)
_CHECK_ML1M = partial(check_data, ml1m.FILES)
_CHECK_INTERACTIONS = partial(check_data, interactions.FILES)

RECIPES = {
    "dlrm_dcnv2": Recipe(dlrm.fitting, run_dlrm, served_dlrm, check_dlrm),
    "dlrm_dcnv2.quickstart": Recipe(dlrm.quickstart, run_dlrm, served_dlrm, check_dlrm),
    "dlrm_dcnv2.criteo_kaggle": Recipe(dlrm.criteo_kaggle, run_dlrm, served_dlrm, check_dlrm),
    "dlrm_dcnv2.mlperf": Recipe(dlrm.mlperf, run_dlrm, served_dlrm, check_dlrm),
    **{
        name: Recipe(config, made.run, made.served, made.check)
        for name, config in made.CONFIGS.items()
    },
    **{
        f"{name}.frappe": Recipe(config, frappe.run, frappe.served, _CHECK_FRAPPE)
        for name, config in frappe.CONFIGS.items()
    },
    **{
        f"{name}.ml1m": Recipe(config, ml1m.run, ml1m.served, _CHECK_ML1M)
        for name, config in ml1m.CONFIGS.items()
    },
    # The first names of dcnv2.frappe and dcnv2.ml1m.
    "ctr-frappe": Recipe(frappe.CONFIGS["dcnv2"], frappe.run, frappe.served, _CHECK_FRAPPE),
    "ctr-ml1m": Recipe(ml1m.CONFIGS["dcnv2"], ml1m.run, ml1m.served, _CHECK_ML1M),
    "shared-bottom": Recipe(
        tasks_of_ml1m.shared_bottom, tasks_of_ml1m.run, tasks_of_ml1m.served, tasks_of_ml1m.check
    ),
    "shared-bottom.sines": Recipe(sines.shared_bottom, sines.run, sines.served, sines.check),
    "mmoe": Recipe(
        tasks_of_ml1m.mmoe, tasks_of_ml1m.run, tasks_of_ml1m.served, tasks_of_ml1m.check
    ),
    "mmoe.sines": Recipe(sines.mmoe, sines.run, sines.served, sines.check),
    "ple": Recipe(tasks_of_ml1m.ple, tasks_of_ml1m.run, tasks_of_ml1m.served, tasks_of_ml1m.check),
    "ple.sines": Recipe(sines.ple, sines.run, sines.served, sines.check),
    "sasrec": Recipe(encoders.sasrec, encoders.run, encoders.served, _CHECK_INTERACTIONS),
    "hstu": Recipe(encoders.hstu, encoders.run, encoders.served, _CHECK_INTERACTIONS),
    "din": Recipe(candidates.din, candidates.run, candidates.served, _CHECK_INTERACTIONS),
    "two-tower": Recipe(
        candidates.two_tower,
        candidates.run,
        candidates.served,
        _CHECK_INTERACTIONS,
    ),
}
