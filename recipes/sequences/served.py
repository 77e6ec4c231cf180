"""Sequence models as servers answer from them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from recipes.sequences.config import RunConfig
from recipes.sequences.interactions import Interactions
from recipes.sequences.packed import HistoryWindows
from recipes.served_run import (
    NUM_ASKED,
    NUM_EXAMPLES,
    ServedRun,
    load_weights,
    newest_step,
    no_checkpoint,
)
from torchembed.models import CandidateScores, Impressions, NextItem, TwoTower
from torchembed.training import CheckpointFolder

NUM_CANDIDATES = 10
"""Candidates of each user of a request."""


def served_sequences(
    config: RunConfig, data: Interactions, build: Callable[[int], nn.Module], output: Path
) -> ServedRun:
    """The model of the last seed that has come to an evaluation, asked for the item that followed
    each history, the first candidate, and for others.

    Args:
        build: from a seed to the model that was trained.
        output: of the run.

    Raises:
        FileNotFoundError: where no seed has.
    """
    folders = {seed: output / f"seed-{seed}" / "checkpoint" for seed in config.seeds}
    trained = [seed for seed, folder in folders.items() if CheckpointFolder(folder).steps()]
    if not trained:
        raise no_checkpoint(output)
    seed = trained[-1]
    num_steps = newest_step(folders[seed])

    windows = HistoryWindows(data, max_length=config.max_length, num_left_out=0)
    return ServedRun(
        checkpoints=folders[seed],
        num_steps=num_steps,
        load_model=lambda: load_weights(build(seed), folders[seed], num_steps),
        examples=(_impressions(windows, NUM_EXAMPLES),),
        request=_request(_impressions(windows, NUM_ASKED)),
    )


def as_scores(served: ServedRun) -> ServedRun:
    """``served``, a model that computes a loss, as one that gives users' vectors and scores."""

    def load_model() -> nn.Module:
        model = served.load_model()
        assert isinstance(model, TwoTower | NextItem)
        return CandidateScores(model)

    return served._replace(load_model=load_model, output="as_it_is")


def _impressions(windows: HistoryWindows, num_users: int) -> Impressions:
    """The first users, each with what followed and the first items as candidates."""
    users = torch.arange(min(num_users, windows.data.num_users))
    num_items = int(windows.lengths[users].sum())
    histories = windows.batch(users, num_users=len(users), capacity=num_items)
    last = (histories.offsets[1:] - 1).clamp_min(0)
    others = torch.arange(NUM_CANDIDATES - 1) % windows.data.num_items
    candidates = torch.cat(
        [histories.next_items[last].unsqueeze(1), others.expand(len(users), -1)], dim=1
    )
    return Impressions(histories.items, histories.offsets, candidates)


def _request(impressions: Impressions) -> dict[str, torch.Tensor]:
    return {
        "items": impressions.items,
        "items.lengths": impressions.offsets.diff().int(),
        "candidates": impressions.candidates,
    }
