"""Models of clicks and of several tasks as servers answer from them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from recipes.ctr.best_seed import best_seed
from recipes.ctr.config import CtrConfig, EarlyStoppedConfig
from recipes.ctr.run import build_model
from recipes.ctr.splits import Splits
from recipes.ctr.tables import rows_in_tables
from recipes.served_run import (
    NUM_EXAMPLES,
    ServedRun,
    click_request,
    load_weights,
    newest_step,
)


def served_clicks(config: CtrConfig, read: Callable[[int], Splits], output: Path) -> ServedRun:
    """The best seed's model of clicks, which gives their probability, asked of the first test rows.

    Args:
        read: from a seed to the divided rows.
        output: of the run.
    """

    def build(seed: int) -> nn.Module:
        rows, num_rows = rows_in_tables(config, read(seed).rows)
        device = torch.device("cpu")
        return build_model(config, num_rows, seed, device, num_dense=rows.num_dense)

    def in_tables(seed: int) -> Splits:
        splits = read(seed)
        return splits._replace(rows=rows_in_tables(config, splits.rows).rows)

    served = served_best(config, in_tables, build, output)
    return served._replace(output_names=["click"])


def served_best(
    config: EarlyStoppedConfig,
    read: Callable[[int], Splits],
    build: Callable[[int], nn.Module],
    output: Path,
) -> ServedRun:
    """The best seed's model, asked of the first test rows.

    Args:
        read: from a seed to the divided rows, with the ids that the model's tables look up.
        build: from a seed to its model, untrained.
        output: of the run.
    """
    best = best_seed(config.seeds, output)
    num_steps = newest_step(best.checkpoints)

    splits = read(best.seed)
    dense, sparse, _ = splits.rows.batch(splits.test[:NUM_EXAMPLES])
    return ServedRun(
        checkpoints=best.checkpoints,
        num_steps=num_steps,
        load_model=lambda: load_weights(build(best.seed), best.checkpoints, num_steps),
        examples=(dense, sparse),
        request=click_request(dense, sparse),
    )
