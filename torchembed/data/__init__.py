"""Batches of clicks: readers, the made click log, and threads that work ahead."""

from torchembed.data.batch import Batch, LabeledInputs, WeightedBatch, as_batch
from torchembed.data.click_log import ClickLog, ClickLogConfig
from torchembed.data.collate import collate
from torchembed.data.criteo import CAT_NAMES, INT_NAMES, MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.data.criteo_text import CriteoText
from torchembed.data.hugectr_keyset import read_hugectr_keyset
from torchembed.data.loader import BackgroundLoader
from torchembed.data.mlperf import MlperfDays
from torchembed.data.open_clicks import open_clicks
from torchembed.data.parquet import ParquetClicks
from torchembed.data.raw_ids import MISSING_ID, text_ids
from torchembed.data.skewed_ids import skewed_ids
from torchembed.data.source import BatchSource, Portion, Split

__all__ = [
    "CAT_NAMES",
    "INT_NAMES",
    "MISSING_ID",
    "MLPERF_HOTNESS",
    "MLPERF_TABLE_SIZES",
    "BackgroundLoader",
    "Batch",
    "BatchSource",
    "ClickLog",
    "ClickLogConfig",
    "CriteoText",
    "LabeledInputs",
    "MlperfDays",
    "ParquetClicks",
    "Portion",
    "Split",
    "WeightedBatch",
    "as_batch",
    "collate",
    "open_clicks",
    "read_hugectr_keyset",
    "skewed_ids",
    "text_ids",
]
