"""The result of a run, and the line that states it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Quality of a model on its test rows, and the training that it took."""

    test_auc: float
    test_logloss: float
    bayes_auc: float | None = None
    """The most that a model can expect, where the data is made."""
    bayes_logloss: float | None = None
    """The least that a model can expect, where the data is made."""
    test_auc_by_seed: dict[int, float] | None = None
    """Only where a run trains once for each of several seeds; the numbers above are then means."""
    test_logloss_by_seed: dict[int, float] | None = None
    modulo_auc: float | None = None
    """The test AUC of static tables of as many rows that take the ids modulo these, where dynamic
    tables were trained beside them."""
    modulo_logloss: float | None = None
    modulo_auc_by_seed: dict[int, float] | None = None
    samples_per_second: float
    """Samples a second of training, over all ranks."""
    num_steps: int
    checkpoint: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingResult:
    """Quality of a model that ranks items for users, and the training that it took."""

    hr_10: float
    """The part of the users whose held-out item is among the first 10, the mean over seeds."""
    ndcg_10: float
    hr_50: float
    hr_200: float
    hr_10_by_seed: dict[int, float]
    ndcg_10_by_seed: dict[int, float]
    samples_per_second: float
    """Histories a second of training, over all ranks."""
    num_steps: int
    checkpoint: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksResult:
    """Quality of a model of several tasks on its test rows, and the training that it took."""

    test: dict[str, float]
    """Each metric of each task as ``task/metric``, the mean over seeds."""
    test_by_seed: dict[int, dict[str, float]]
    samples_per_second: float
    """Samples a second of training, over all ranks."""
    num_steps: int
    checkpoint: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped:
    """Result of a run that a signal ended: it can go on with ``--resume``."""

    num_steps: int


def result_line(
    result: Result | RankingResult | TasksResult, *, num_ranks: int, seconds: float
) -> str:
    """``RESULT`` and one JSON object, in which NaN is null and what does not apply is left out.

    Args:
        num_ranks: processes of the run.
        seconds: of the whole run.
    """
    fields = dataclasses.asdict(result) | {"num_ranks": num_ranks, "seconds": seconds}
    known = {key: _as_json(value) for key, value in fields.items() if value is not None}
    return "RESULT " + json.dumps(known)


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
