"""Do rows of 16 bits and row-wise Adagrad learn as well on real clicks? An MLP on Frappe.

``python -m bench.training.frappe_rows --data frappe_x1r.npz`` trains the tables' choices of
``bench.training.quality --compare rows`` with several seeds, until the AUC on the validation rows
has not improved for some epochs, and prints the AUC on the test rows at its best. The file has
arrays ``{train,valid,test}_x``, the ids of ten fields, numbered through all of them, and
``{train,valid,test}_y``, the labels. ``--output`` is written after each training.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from bench.report.result_file import Row, write_results
from bench.training.quality import CHOICES, bytes_per_row, compare, line
from torchembed import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Normal,
    SparseFeatures,
    optim,
)
from torchembed.data import Batch
from torchembed.models import DNN
from torchembed.tables import table_of
from torchembed.training import Evaluation, TrainPipeline, evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Trainings to compare."""

    data: Path
    """The ``.npz`` file."""
    embedding_dim: int = 16
    layer_sizes: tuple[int, ...] = (128, 128)
    dropout: float = 0.2
    batch_size: int = 4096
    learning_rate: float = 0.05
    """Learning rate of Adagrad for tables."""
    dense_learning_rate: float = 0.001
    """Learning rate of Adam for all else."""
    patience: int = 2
    max_epochs: int = 30
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of initial weights, of the order of the rows and of dropout."""
    output: Path | None = None
    """JSON to write the rows to."""


class Part:
    """The training, validation or test rows."""

    def __init__(self, ids: Tensor, labels: Tensor, keys: tuple[str, ...]) -> None:
        self.ids, self.labels, self._keys = ids, labels, keys

    def batches(self, order: Tensor, batch_size: int) -> Iterator[Batch]:
        """Batches of the rows ``order``; the last one may be smaller."""
        for numbers in order.to(self.ids.device).split(batch_size):
            values = self.ids[numbers].t().reshape(-1)
            sparse = SparseFeatures(
                keys=self._keys,
                values=values,
                batch_size=len(numbers),
                hotness=(1,) * len(self._keys),
            )
            yield Batch(None, sparse, self.labels[numbers].unsqueeze(1))

    def quality(self, model: DNN) -> Evaluation:
        """How ``model`` does on all rows."""
        return evaluate(model, list(self.batches(torch.arange(len(self.labels)), 8192)))


def read(path: Path, device: torch.device) -> tuple[dict[str, Part], list[int]]:
    """The three parts on ``device``, whose ids begin at 0 in each field, and the fields' numbers of
    ids."""
    with np.load(path) as arrays:
        ids = {part: arrays[f"{part}_x"].astype(np.int64) for part in ("train", "valid", "test")}
        labels = {part: arrays[f"{part}_y"].astype(np.float32) for part in ids}
    rows = np.concatenate(list(ids.values()))
    first, last = rows.min(axis=0), rows.max(axis=0)
    keys = tuple(f"field_{number}" for number in range(len(first)))
    parts = {
        part: Part(
            torch.from_numpy(ids[part] - first).to(device),
            torch.from_numpy(labels[part]).to(device),
            keys,
        )
        for part in ids
    }
    return parts, (last - first + 1).tolist()


def train_once(
    config: Config, name: str, seed: int, parts: dict[str, Part], sizes: list[int]
) -> Row:
    """One training with a choice, and how it then does on the test rows."""
    choice = CHOICES["rows"][name]
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(
            name=f"field_{number}",
            num_embeddings=size,
            embedding_dim=config.embedding_dim,
            feature_names=(f"field_{number}",),
            initializer=Normal(std=0.01),
            dtype=choice.rows,
        )
        for number, size in enumerate(sizes)
    ]
    device = parts["train"].ids.device
    collection = EmbeddingBagCollection(
        configs, seed=seed, device=device, output_dtype=torch.float32
    )
    model = DNN(
        collection,
        layer_sizes=config.layer_sizes,
        dropout=config.dropout,
        dense_device=device,
    )
    tables = [p for p in model.parameters() if table_of(p) is not None]
    others = [p for p in model.parameters() if table_of(p) is None]
    of_tables = choice.optimizer(tables, lr=config.learning_rate, eps=1e-8)
    of_others = optim.DenseAdam(others, lr=config.dense_learning_rate)
    train, order = parts["train"], torch.Generator().manual_seed(seed)
    best, since_best, num_epochs = (0.0, Evaluation(0.0, 0.0, 0)), 0, 0
    start = time.perf_counter()
    with TrainPipeline(
        model, F.binary_cross_entropy_with_logits, [of_tables, of_others]
    ) as pipeline:
        while since_best < config.patience and num_epochs < config.max_epochs:
            numbers = torch.randperm(len(train.labels), generator=order)
            model.train()
            stream = train.batches(numbers, config.batch_size)
            for _ in range(-(-len(numbers) // config.batch_size)):
                pipeline.progress(stream)
            num_epochs, since_best = num_epochs + 1, since_best + 1
            model.eval()
            auc = parts["valid"].quality(model).auc
            if auc > best[0]:
                best, since_best = (auc, parts["test"].quality(model)), 0
    return {
        "bench": "frappe_rows",
        "choice": name,
        "bytes_per_row": bytes_per_row(tables[0], of_tables),
        "seed": seed,
        "auc": best[1].auc,
        "logloss": best[1].logloss,
        "validation_auc": best[0],
        "num_epochs": num_epochs,
        "train_seconds": time.perf_counter() - start,
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
    }


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts, sizes = read(config.data, device)
    rows: list[Row] = []
    print(f"{'choice':24} seed      AUC  log loss  epochs  seconds", flush=True)
    for seed in config.seeds:
        for name in CHOICES["rows"]:
            row = train_once(config, name, seed, parts, sizes)
            rows.append(row)
            print(
                f"{name:24} {seed:4d}  {row['auc']:.5f}   {row['logloss']:.5f}  "
                f"{row['num_epochs']:6d} {row['train_seconds']:8.1f}",
                flush=True,
            )
            if config.output is not None:
                write_results(config.output, [*rows, *summaries(rows)])
    print("\n".join(map(line, summaries(rows))))


def summaries(rows: list[Row]) -> list[Row]:
    """Distance of each choice from float32 rows under Adagrad; nothing is known of the best AUC."""
    return [
        {key: value for key, value in summary.items() if key != "bayes_auc"}
        for summary in compare(rows, CHOICES["rows"], float("nan"))
    ]


if __name__ == "__main__":
    main()
