"""DIN and two towers: models of candidates for users with histories."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import torchembed
from recipes.data_folder import find_data
from recipes.ranks import check_batch_size, shard_over_ranks
from recipes.result import RankingResult, Stopped
from recipes.sequences.config import CandidateConfig, CandidateModel
from recipes.sequences.evaluate import Score, evaluate
from recipes.sequences.interactions import FILES, Interactions, read
from recipes.sequences.packed import HELD_OUT, HistoryWindows
from recipes.sequences.samples import SampleBatches, Samples
from recipes.sequences.seeds import Trainee, epoch_order, item_table, run_seeds
from recipes.sequences.served import as_scores, served_sequences
from recipes.served_run import ServedRun
from torchembed.core import ranks
from torchembed.models import DIN, Histories, Impressions, TwoTower
from torchembed.training import BatchLoss

_CANDIDATES_AT_ONCE = 256
_USERS_AT_ONCE = {CandidateModel.DIN: 64, CandidateModel.TWO_TOWER: 256}


def din(data: str | Path | None = None) -> CandidateConfig:
    """DIN on MovieLens-1M: each user's last movie, ranked among all.

    The data are those of the recipe sasrec. Each movie that a user rated is told from one that is
    drawn at random.
    """
    return CandidateConfig(data=data, model=CandidateModel.DIN, layer_sizes=(200, 80))


def two_tower(data: str | Path | None = None) -> CandidateConfig:
    """Two towers on MovieLens-1M: each user's last movie, ranked among all.

    The data are those of the recipe sasrec. Each movie that a user rated is told from those of the
    other samples of a batch.
    """
    return CandidateConfig(
        data=data,
        model=CandidateModel.TWO_TOWER,
        epochs=10,
        evaluate_every=5,
        embedding_dim=64,
        layer_sizes=(128, 64),
    )


def run(config: CandidateConfig, device: torch.device, output: Path) -> RankingResult | Stopped:
    """Train once for each seed."""
    check_batch_size(config.batch_size)
    data = read(find_data(FILES, config.data))
    samples = Samples(data, max_length=config.max_length, num_left_out=HELD_OUT)
    if len(samples) < config.batch_size:
        raise ValueError(
            f"batch_size must be at most the number of samples, {len(samples)}, got "
            f"{config.batch_size}"
        )
    return run_seeds(config, lambda seed: _prepared(config, data, samples, seed, device), output)


def served(config: CandidateConfig, output: Path) -> ServedRun:
    """The last seed's model: DIN gives the probability of each candidate, two towers give users'
    vectors and the scores of candidates."""
    data = read(find_data(FILES, config.data))
    samples = Samples(data, max_length=config.max_length, num_left_out=HELD_OUT)

    def build(seed: int) -> DIN | TwoTower:
        return _build_model(config, data, samples, seed, torch.device("cpu"))

    found = served_sequences(config, data, build, output)
    if config.model is CandidateModel.DIN:
        return found._replace(output_names=["click"])
    return as_scores(found)


def _build_model(
    config: CandidateConfig,
    data: Interactions,
    samples: Samples,
    seed: int,
    device: torch.device,
) -> DIN | TwoTower:
    """The model with its item table, spread over the ranks."""
    items = item_table(config, data.num_items, seed, device)
    sizes = {"embedding_dim": config.embedding_dim, "max_length": config.max_length}
    model: DIN | TwoTower
    if config.model is CandidateModel.DIN:
        model = DIN(
            items,
            **sizes,
            attention_sizes=config.attention_sizes,
            layer_sizes=config.layer_sizes,
            dense_device=device,
        )
    else:
        counts = samples.chosen.bincount(minlength=data.num_items)
        model = TwoTower(
            items,
            **sizes,
            layer_sizes=config.layer_sizes,
            temperature=config.temperature,
            item_probabilities=counts / len(samples) if config.corrects_sampling else None,
            dense_device=device,
        )
    shard_over_ranks(model, device, torchembed.optim.Adam)
    return model


def _prepared(
    config: CandidateConfig,
    data: Interactions,
    samples: Samples,
    seed: int,
    device: torch.device,
) -> Trainee:
    model = _build_model(config, data, samples, seed, device)

    def batches(epoch: int) -> SampleBatches:
        return SampleBatches(
            samples,
            epoch_order(len(samples), seed, epoch),
            batch_size=config.batch_size,
            rank=ranks.rank(),
            num_ranks=ranks.world_size(),
            negatives_seed=1_000_003 * seed + epoch if isinstance(model, DIN) else None,
        )

    def make_score() -> Score:
        all_items = torch.arange(data.num_items, device=device)
        if isinstance(model, DIN):
            return _scores_by_din(config, model, all_items)
        return _scores_by_towers(config, model, all_items)

    held_out = HistoryWindows(data, max_length=config.max_length, num_left_out=0)
    num_batches = len(samples) // config.batch_size
    return Trainee(
        model=model,
        loss_fn=BatchLoss(_click_loss) if isinstance(model, DIN) else None,
        batches=batches,
        num_batches=num_batches,
        num_samples=num_batches * config.batch_size,
        evaluate=lambda: evaluate(
            model, make_score, held_out, device=device, num_users=_USERS_AT_ONCE[config.model]
        ),
    )


def _click_loss(logits: Tensor, impressions: Impressions) -> Tensor:
    assert impressions.labels is not None
    return F.binary_cross_entropy_with_logits(logits, impressions.labels)


def _scores_by_din(config: CandidateConfig, model: DIN, all_items: Tensor) -> Score:
    def score(histories: Histories) -> Tensor:
        found = []
        for items in all_items.split(_CANDIDATES_AT_ONCE):
            candidates = items.expand(len(histories.offsets) - 1, -1)
            with config.precision.context(all_items.device):
                found.append(model(Impressions(histories.items, histories.offsets, candidates)))
        return torch.cat(found, dim=1)

    return score


def _scores_by_towers(config: CandidateConfig, model: TwoTower, all_items: Tensor) -> Score:
    with config.precision.context(all_items.device):
        items = model.item_vectors(all_items).T

    def score(histories: Histories) -> Tensor:
        none = histories.offsets.new_zeros(len(histories.offsets) - 1, 1)
        with config.precision.context(all_items.device):
            users = model.user_vectors(Impressions(histories.items, histories.offsets, none))
        return users @ items

    return score
