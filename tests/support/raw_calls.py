"""Arguments that fit, for a call of each operation without its public function."""

from typing import Any

import torch

import torchembed.ops.columns
import torchembed.ops.dense_update
import torchembed.ops.id_shares
import torchembed.ops.initialize_rows
import torchembed.ops.jagged
import torchembed.ops.linearize_ids
import torchembed.ops.pooled_lookup
import torchembed.ops.row_codec
import torchembed.ops.rowwise_update
import torchembed.ops.segments
import torchembed.ops.sequence_lookup  # noqa: F401
from torchembed.core.types import OptimizerKind
from torchembed.ops.segments import find_runs

LONG = torch.int64
IDS = torch.tensor([0, 1, 1])
OFFSETS = torch.tensor([0, 1, 3])
WEIGHT = torch.ones(4, 2)
BAGS = {"offsets": None, "hotness": [1], "num_features": 1, "batch_size": 3}
RUNS = find_runs(IDS, 4)._asdict()
ONE = torch.ones(1)
FITTING: dict[str, dict[str, Any]] = {
    "join_columns": {
        "parts": [WEIGHT, WEIGHT],
        "targets": [2, 0],
        "widths": [2, 2],
        "num_columns": 4,
    },
    "split_columns": {
        "joined": WEIGHT,
        "targets": [1, 0],
        "widths": [1, 1],
        "part_columns": [2],
    },
    "linearize_ids": {
        "values": IDS,
        "offsets": None,
        "hotness": [1],
        "first_rows": torch.tensor([0]),
        "num_rows": torch.tensor([4]),
        "batch_size": 3,
        "on_bad_id": 0,
        "rows_dtype": LONG,
    },
    "shares_of_ids": {"ids": IDS, "num_shares": 2},
    "encode_rows": {"rows": WEIGHT},
    "scaled_rows": {"rows": WEIGHT},
    "decode_rows": {"codes": torch.zeros(3, 2, dtype=torch.uint8), "dtype": torch.float32},
    "are_in_share": {
        "ids": IDS,
        "hotness": [1],
        "num_shares": torch.tensor([2]),
        "shares": torch.tensor([1]),
        "batch_size": 3,
    },
    "locate_bad_id": {
        "values": IDS,
        "first_bad": torch.tensor([1]),
        "bounds": torch.tensor([0, 1, 3]),
        "location": torch.zeros(4, dtype=LONG),
    },
    "pooled_lookup_forward": {
        "weight": WEIGHT,
        "rows": IDS,
        **BAGS,
        "per_id_weights": None,
        "mean": False,
        "output_dtype": torch.float32,
    },
    "pooled_lookup_gradient_map": {
        "ids_like": IDS,
        **BAGS,
        "per_id_weights": None,
        "mean": True,
    },
    "pooled_lookup_weights_backward": {
        "grad": torch.ones(3, 1, 2),
        "weight": WEIGHT,
        "rows": IDS,
        "offsets": None,
        "hotness": [1],
        "mean": False,
    },
    "sequence_lookup_forward": {"weight": WEIGHT, "rows": IDS, "output_dtype": torch.float32},
    "find_runs": {"rows": IDS, "num_rows": 4},
    "initialize_rows": {
        "weight": torch.ones(4, 2),
        "state0": torch.ones(4, 2),
        "state1": torch.ones(4),
        "rows": IDS,
        "ids": IDS,
        "tables": torch.zeros(3, dtype=torch.int32),
        "num_new": torch.tensor([2]),
        "table_keys": torch.tensor([5]),
        "kinds": torch.tensor([0], dtype=torch.int32),
        "parameters": torch.ones(1, 2),
        "first_columns": None,
        "initial_state": 0.0,
    },
    "rowwise_update": {
        "weight": WEIGHT,
        "state0": None,
        "state1": None,
        **RUNS,
        "grad": torch.ones(3, 2),
        "gradient_rows": None,
        "scales": None,
        "lr": ONE,
        "step": None,
        "grad_multiplier": None,
        "skip": None,
        "row_offsets": None,
        "row_keys": None,
        "first_columns": None,
        "optimizer": int(OptimizerKind.SGD),
        "eps": 0.0,
        "beta1": 0.0,
        "beta2": 0.0,
        "weight_decay": 0.0,
        "max_gradient": 0.0,
    },
    "dense_update": {
        "weight": torch.ones(9),
        "state0": None,
        "state1": None,
        "rounded": None,
        "grad": torch.ones(9),
        "lr": ONE,
        "step": None,
        "grad_multiplier": None,
        "skip": None,
        "bounds": [0, 9],
        "optimizer": int(OptimizerKind.SGD),
        "eps": 0.0,
        "beta1": 0.0,
        "beta2": 0.0,
        "weight_decay": 0.0,
    },
    "permute_features_forward": {
        "values": IDS,
        "offsets": OFFSETS,
        "weights": None,
        "permutation": [1, 0],
        "num_features": 2,
        "batch_size": 1,
        "num_ids": 3,
    },
    "permute_features_backward": {
        "grad": torch.ones(3),
        "offsets": OFFSETS,
        "new_offsets": torch.tensor([0, 2, 3]),
        "permutation": [1, 0],
        "num_features": 2,
        "batch_size": 1,
        "num_values": 3,
    },
    "bucketize_rows": {
        "values": IDS,
        "offsets": OFFSETS,
        "weights": None,
        "boundaries": torch.tensor([[0, 1, 4]]),
        "batch_size": 2,
    },
}
SPREAD = torch.zeros(3, 1).expand(3, 2)
"""Two columns that are one in memory: reading it as if they lay side by side leaves it."""
