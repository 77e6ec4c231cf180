"""Trains a run on, and publishes what it learns: ``python -m recipes.live.trainer``.

It goes on from the newest checkpoint of the run, over the training rows again and again, and saves
nothing. Versions that it publishes are the deployed one and the number of steps since. SIGTERM ends
it.
"""

import argparse
import itertools
from pathlib import Path

import torch

from recipes.dlrm_dcnv2.config import DlrmConfig
from recipes.dlrm_dcnv2.run import build_model, build_optimizers, open_split
from recipes.dlrm_dcnv2.run import run as run_dlrm
from recipes.output import earlier_arguments
from recipes.registry import RECIPES
from recipes.train import parse
from torchembed.data import BackgroundLoader, Split
from torchembed.ops.binary_cross_entropy import binary_cross_entropy
from torchembed.training import (
    CheckpointFolder,
    ModelPublisher,
    StopSignal,
    TrainingRun,
    TrainPipeline,
    train,
)


def can_train(recipe: str) -> bool:
    """True for recipes whose runs this can train on."""
    return RECIPES[recipe].run is run_dlrm


def num_ids(config: DlrmConfig) -> int:
    """The least number of rows that a table of a run has."""
    return min(open_split(config, Split.VALIDATION).table_sizes)


def main() -> None:
    """Train until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m recipes.live.trainer")
    parser.add_argument("recipe")
    parser.add_argument("run", type=Path)
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--name", required=True, help="of the deployed model")
    parser.add_argument("--version", type=int, required=True, help="that is deployed of it")
    parser.add_argument("--publish-every", type=int, default=8, help="steps")
    given = parser.parse_args()
    arguments = earlier_arguments(given.run, given.recipe)
    config = parse([given.recipe, *arguments]).config
    assert isinstance(config, DlrmConfig)
    rows = open_split(config, Split.TRAIN)
    model = build_model(config, rows, torch.device("cpu"))
    optimizers = build_optimizers(config, model)
    checkpoints = CheckpointFolder(given.run / "checkpoint")
    checkpoints.load(TrainingRun(model=model, optimizers=optimizers))
    version = given.version
    with (
        TrainPipeline(model, binary_cross_entropy, optimizers) as pipeline,
        BackgroundLoader(rows, num_ahead=config.read_ahead) as loader,
        ModelPublisher(model, given.name, given.kafka) as publisher,
        StopSignal() as stop,
    ):
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        while not stop.is_agreed:
            train(pipeline, batches, max_steps=given.publish_every, stop=stop)
            version += given.publish_every
            # Of static tables nobody knows which rows a step has changed.
            publisher.publish(version, whole=not config.dynamic)


if __name__ == "__main__":
    main()
