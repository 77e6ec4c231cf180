"""The runs of DLRM-DCNv2."""

import dataclasses
from pathlib import Path
from typing import Literal

from recipes.budgets import Budgets
from recipes.dynamic import DEFAULT_EVICTION, DEFAULT_SHARED, Eviction, check_dynamic
from recipes.host_memory import check_cached
from recipes.precision import Precision, WireDtype
from torchembed.data import MLPERF_TABLE_SIZES, ClickLogConfig
from torchembed.data.data_path import data_path
from torchembed.data.mlperf import mlperf_days
from torchembed.sharding import Placement
from torchembed.training import EarlyStop, LearningRate

_NOT_DAILY = (
    *("epochs", "max_steps", "evaluate_every", "target_auc", "patience", "keep_best"),
    "mlperf_log",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    """A run, wholly. Text, Parquet or MLPerf's files, told apart by their names, or a made log."""

    # A string first: the command line takes the first that fits, and a Path takes a slash of URLs.
    data: str | Path | None = None
    """A folder or file of clicks, or its URL; without it the made click log."""
    output: Path | None = None
    """A folder for checkpoint and picture; without it runs/<recipe>-<time>."""
    click_log: ClickLogConfig = ClickLogConfig()
    """The made click log."""
    table_sizes: tuple[int, ...] = MLPERF_TABLE_SIZES
    """Rows of each table, where the data does not say; ids are taken modulo these."""
    max_table_rows: int | None = None
    """No table gets more rows than this."""
    dynamic: bool = False
    """Look up the data's own ids, hexadecimal ones as their numbers, in dynamic tables of as many
    rows."""
    capacity: float | None = None
    """Rows of each table, for each that it has otherwise: with 0.3 it has 30 % of them."""
    eviction: Eviction = DEFAULT_EVICTION
    """Whose row goes where a dynamic table is full."""
    shared: float = DEFAULT_SHARED
    """Part of the rows of a dynamic table of a given capacity that the ids without a row of their
    own share by a hash; with 0 they are looked up as zeros."""
    cached: float | None = None
    """Keep the large tables in host memory, behind a cache on each device for this part of their
    rows; with 0.1 for 10 % of them. Without it all tables live on the devices."""
    device_bytes: int | None = None
    """Place tables by their cost so that they take no more memory of each device; what has no room
    goes to host memory, then to disk."""
    host_bytes: int | None = None
    """Memory of the host that tables may take beside that, of all ranks together."""
    disk: Path | None = None
    """Folder for the rows that neither has room for, on a disk of each node."""
    held_out: float = 0.1
    """Part of the rows to hold out where there is one file; else the last file is held out."""
    embedding_dim: int = 128
    dense_arch: tuple[int, ...] = (512, 256, 128)
    """Widths of the layers over the dense features."""
    over_arch: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    """Widths of the layers over the cross network."""
    num_cross_layers: int = 3
    low_rank: int = 512
    """Rank of each cross layer's factors."""
    placement: Placement | None = None
    """Placement of every table; without it the plan chooses."""
    precision: Precision = Precision.FP32
    """Precision of all but weights and losses, which are float32."""
    wire_forward: WireDtype = WireDtype.OWN
    """Dtype in which several ranks send each other looked-up vectors."""
    wire_backward: WireDtype = WireDtype.OWN
    """Dtype in which they send the gradients of these."""
    batch_size: int = 65_536
    """Samples a step, over all ranks."""
    learning_rate: float = 0.004
    """Learning rate of Adagrad, for tables and dense layers."""
    eps: float = 1e-8
    """Epsilon of Adagrad."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows to its value, in a line."""
    decay_start_step: int = 0
    """Step at which the decay of the learning rate begins."""
    decay_steps: int = 0
    """Steps over which it falls, along a parabola; 0 for a constant rate."""
    end_learning_rate: float = 1e-7
    """The least learning rate of the decay, and that of all steps after it."""
    daily: bool = False
    """Train each file of the data once, in turn, but for the last, which is held out; after each
    evaluate, and export what has changed to the folder exports."""
    epochs: int = 1
    max_steps: int | None = None
    """Stop after so many."""
    evaluate_every: int | None = None
    """Steps between evaluations on validation rows; without it one, after the last step."""
    target_auc: float | None = None
    """Stop at this AUC on the validation rows."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better AUC."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation too, in the folder best, and test that model."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, written from a copy in the machine's memory while training goes
    on; without it one, at the end or where a signal ends the run."""
    read_ahead: int = 4
    """Batches that threads make ahead of the step; rows on disk of all of these are read ahead."""
    tensorboard: bool = False
    """Write metrics for TensorBoard too."""
    mlperf_log: Literal["closed", "open"] | None = None
    """Write the lines that MLPerf's compliance checker wants for this division, in mlperf.log;
    needs the package mlperf-logging."""
    mlperf_org: str = "unknown"
    """Name of the submitter in that log."""
    read_loss_every: int = 50
    """Steps between points of the loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "embedding_dim", "read_loss_every", "read_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_steps", "evaluate_every", "checkpoint_every", "max_table_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or left out, got {value}")
        self._check_daily()
        check_dynamic(
            is_dynamic=self.dynamic,
            capacity=self.capacity,
            eviction=self.eviction,
            shared=self.shared,
        )
        check_cached(self.cached)
        if self.budgets is not None and self.cached is not None:
            raise ValueError(
                "cached must be left out where device_bytes and host_bytes say what memory tables "
                f"may take, got {self.cached}"
            )
        if self.over_arch[-1:] != (1,):
            raise ValueError(f"over_arch must end with 1, the logit, got {self.over_arch}")
        # They check their own fields.
        _ = self.schedule, self.early_stop()

    def _check_daily(self) -> None:
        """Raise where a field is set that says nothing of days."""
        if not self.daily:
            return
        if self.data is None:
            raise ValueError("data must name a folder of days to be trained daily, got none")
        for field in dataclasses.fields(self):
            if field.name in _NOT_DAILY and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name} must be left out where days are trained in turn, got "
                    f"{getattr(self, field.name)}; leave out daily to set it"
                )

    @property
    def budgets(self) -> Budgets | None:
        """Memory that tables may take; None where nothing is said of it."""
        return Budgets.of(self.device_bytes, self.host_bytes, self.disk)

    @property
    def schedule(self) -> LearningRate:
        """The schedule of the learning rate."""
        return LearningRate(
            warmup_steps=self.warmup_steps,
            decay_start_step=self.decay_start_step,
            decay_steps=self.decay_steps,
            end_value=self.end_learning_rate,
        )

    def early_stop(self) -> EarlyStop:
        """When to stop, before any evaluation."""
        return EarlyStop(target_auc=self.target_auc, patience=self.patience)


def quickstart(data: str | Path | None = None) -> DlrmConfig:
    """A small model and a made click log: minutes on two CPU cores, and near the best AUC."""
    return DlrmConfig(
        data=data,
        embedding_dim=16,
        dense_arch=(128, 64, 16),
        over_arch=(256, 128, 1),
        num_cross_layers=3,
        low_rank=64,
        batch_size=2048,
        learning_rate=0.02,
        warmup_steps=200,
        evaluate_every=128,
        read_loss_every=32,
    )


# Distinct ids of each feature in Kaggle's train.txt.
# fmt: off
_KAGGLE_NUM_IDS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27,
    14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)
# fmt: on


def criteo_kaggle(data: str | Path | None = None) -> DlrmConfig:
    """Criteo's Kaggle data: ids hashed into moderate tables, a small model, one pass."""
    return DlrmConfig(
        data=data,
        table_sizes=tuple(2 * num_ids for num_ids in _KAGGLE_NUM_IDS),
        max_table_rows=1 << 17,
        embedding_dim=16,
        dense_arch=(256, 64, 16),
        over_arch=(256, 128, 1),
        num_cross_layers=3,
        low_rank=64,
        batch_size=256,
        learning_rate=0.02,
        read_loss_every=10,
    )


def mlperf(data: str | Path | None = None) -> DlrmConfig:
    """MLPerf Training's model on Criteo 1TB: 104 GB of rows, and as much of Adagrad's."""
    return DlrmConfig(data=data, evaluate_every=3200, target_auc=0.80275)


def fitting(data: str | Path | None = None) -> DlrmConfig:
    """DLRM-DCNv2 on MLPerf's files or another click log; without data, the quickstart."""
    if data is None:
        return quickstart()
    path = data_path(data)
    is_mlperf = path.is_dir() and bool(mlperf_days(path))
    return mlperf(data) if is_mlperf else criteo_kaggle(data)
