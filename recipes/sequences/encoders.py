"""SASRec and HSTU: encoders of histories that predict each next item."""

from pathlib import Path

import torch

import torchembed
from recipes.data_folder import find_data
from recipes.ranks import check_batch_size, shard_over_ranks
from recipes.result import RankingResult, Stopped
from recipes.sequences.config import Encoder, SequenceConfig
from recipes.sequences.evaluate import Score, evaluate
from recipes.sequences.interactions import FILES, Interactions, read
from recipes.sequences.packed import HELD_OUT, HistoryWindows, PackedBatches, needed_capacity
from recipes.sequences.seeds import Trainee, epoch_order, item_table, run_seeds
from recipes.sequences.served import as_scores, served_sequences
from recipes.served_run import ServedRun
from torchembed.core import ranks
from torchembed.models import HSTU, Histories, NextItem, SASRec

_CLASSES = {Encoder.SASREC: SASRec, Encoder.HSTU: HSTU}


def sasrec(data: str | Path | None = None) -> SequenceConfig:
    """SASRec on MovieLens-1M: each user's last movie, ranked among all.

    The data are GroupLens' ml-1m as published: ratings.dat (UserID::MovieID::Rating::Timestamp) and
    movies.dat (MovieID::Title::Genres), in --data or in a folder ml-1m there. Read as well, in
    place of ratings.dat: ratings.npz with arrays user, movie and time_rank.
    """
    return SequenceConfig(data=data, encoder=Encoder.SASREC)


def hstu(data: str | Path | None = None) -> SequenceConfig:
    """HSTU on MovieLens-1M: each user's last movie, ranked among all.

    The data are those of the recipe sasrec. Its attention goes by the times of ratings where these
    are there, in ratings.dat; ratings.npz has their order alone.
    """
    return SequenceConfig(data=data, encoder=Encoder.HSTU)


def run(config: SequenceConfig, device: torch.device, output: Path) -> RankingResult | Stopped:
    """Train once for each seed."""
    check_batch_size(config.batch_size)
    data = read(find_data(FILES, config.data))
    return run_seeds(config, lambda seed: _prepared(config, data, seed, device), output)


def served(config: SequenceConfig, output: Path) -> ServedRun:
    """The last seed's model, which gives users' vectors and the scores of candidates.

    Raises:
        ValueError: for HSTU where the data have times, which requests do not.
    """
    data = read(find_data(FILES, config.data))
    if config.encoder is Encoder.HSTU and data.times is not None:
        raise ValueError(
            "a run of hstu must be on data without times to be served, since requests have none, "
            "and its data have the times of ratings; train it on ratings.npz, which has the order "
            "of ratings alone, or serve sasrec"
        )

    def build(seed: int) -> NextItem:
        return _build_model(config, data.num_items, seed, torch.device("cpu"))

    return as_scores(served_sequences(config, data, build, output))


def _prepared(
    config: SequenceConfig, data: Interactions, seed: int, device: torch.device
) -> Trainee:
    model = _build_model(config, data.num_items, seed, device)
    windows, held_out = (
        HistoryWindows(data, max_length=config.max_length, num_left_out=num_left_out)
        for num_left_out in (HELD_OUT, 0)
    )
    orders = [epoch_order(data.num_users, seed, epoch) for epoch in range(config.epochs)]
    sizes = {"batch_size": config.batch_size, "num_ranks": ranks.world_size()}
    capacity = needed_capacity(windows, orders, **sizes)

    def batches(epoch: int) -> PackedBatches:
        return PackedBatches(windows, orders[epoch], capacity=capacity, rank=ranks.rank(), **sizes)

    def make_score() -> Score:
        items = model.item_vectors().T

        def score(histories: Histories) -> torch.Tensor:
            with config.precision.context(device):
                users = model.user_vectors(histories)
            return users @ items

        return score

    return Trainee(
        model=model,
        loss_fn=None,
        batches=batches,
        num_batches=len(batches(0)),
        num_samples=data.num_users,
        evaluate=lambda: evaluate(model, make_score, held_out, device=device),
    )


def _build_model(
    config: SequenceConfig, num_items: int, seed: int, device: torch.device
) -> NextItem:
    """The encoder with its item table, spread over the ranks."""
    encoder = _CLASSES[config.encoder](
        item_table(config, num_items, seed, device),
        embedding_dim=config.embedding_dim,
        max_length=config.max_length,
        num_blocks=config.num_blocks,
        num_heads=config.num_heads,
        dropout=config.dropout,
        dense_device=device,
    )
    model = NextItem(
        encoder,
        num_items=num_items,
        num_negatives=config.num_negatives,
        temperature=config.temperature,
    )
    shard_over_ranks(model, device, torchembed.optim.Adam)
    return model
