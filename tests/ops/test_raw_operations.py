"""Errors of every operation for arguments that do not fit, when it is called without its public
function: the same of each kernel, before any memory is touched."""

from typing import Any

import pytest
import torch

import torchembed.ops.columns
import torchembed.ops.dense_update
import torchembed.ops.id_shares
import torchembed.ops.jagged
import torchembed.ops.linearize_ids
import torchembed.ops.pooled_lookup
import torchembed.ops.row_codec
import torchembed.ops.rowwise_update
import torchembed.ops.segments
import torchembed.ops.sequence_lookup  # noqa: F401
from tests.support import raw_cache_calls, raw_dense_calls, raw_hash_calls, raw_push_calls
from tests.support.raw_calls import FITTING, IDS, LONG, OFFSETS, ONE, RUNS, SPREAD, WEIGHT
from torchembed.core.trees import map_tensors

HALF = WEIGHT.half()
SPREAD_IDS = torch.zeros(1, dtype=LONG).expand(3)
NOT_THERE = torch.zeros(3, dtype=LONG, device="meta")

ERRORS: dict[str, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    "join_columns": [
        (ValueError, r"^parts must hold at least one matrix, got none$", {"parts": []}),
        (TypeError, r"^parts\[0\] must be float32 or float16 or", {"parts": [WEIGHT.long()] * 2}),
        (
            TypeError,
            r"^parts\[1\] must be float32, got float16",
            {"parts": [WEIGHT, WEIGHT.half()]},
        ),
        (ValueError, r"^parts\[1\] must have contiguous rows", {"parts": [WEIGHT, WEIGHT[:2].T]}),
        (ValueError, r"^parts\[1\] must have shape \(4, 2\)", {"parts": [WEIGHT, WEIGHT[1:]]}),
        (ValueError, r"^targets must hold 2 numbers, one for each width, got 1", {"targets": [0]}),
        (ValueError, r"^widths must be positive and fill .* got \[2, 1\]$", {"widths": [2, 1]}),
        (ValueError, r"^widths must be positive and fill .* got \[4, 0\]$", {"widths": [4, 0]}),
        (
            ValueError,
            r"^widths must end with the last of the parts' \[2, 2\] columns, got \[2, 2, 2\]$",
            {"widths": [2, 2, 2], "targets": [0, 2, 4]},
        ),
        (ValueError, r"^targets must place each piece behind another", {"targets": [1, 0]}),
        (ValueError, r"^targets must place each piece behind another", {"targets": [2, -1]}),
        (ValueError, r"end of the 5 columns, got \[2, 0\] for widths", {"num_columns": 5}),
    ],
    "split_columns": [
        (TypeError, r"^joined must be float32 or float16 or", {"joined": WEIGHT.long()}),
        (ValueError, r"^joined must have contiguous rows", {"joined": WEIGHT[:2].T}),
        (ValueError, r"^widths must be positive and fill", {"part_columns": [3]}),
        (ValueError, r"^targets must place each piece behind another", {"targets": [1, 1]}),
    ],
    "linearize_ids": [
        (ValueError, r"^hotness must be 1 counts >= 0, .*, got \[-3\]$", {"hotness": [-3]}),
        (ValueError, r"^hotness must be 1 counts >= 0, .*, got \[1, 2\]$", {"hotness": [1, 2]}),
        (ValueError, r"^batch_size must not be negative, got -3$", {"batch_size": -3}),
        (
            ValueError,
            r"^num_features \* batch_size must be less than 2\*\*31, got 1 \* 2147483648; split",
            {"batch_size": 2**31},
        ),
        (
            ValueError,
            r"^values must hold 6917529027641081856 elements .sum.hotness. \* batch_size., got 3$",
            {"hotness": [2**61]},
        ),
        (
            ValueError,
            r"^offsets must hold 4 elements \(num_features \* batch_size \+ 1\), got 3$",
            {"offsets": OFFSETS},
        ),
        (ValueError, r"^values must be contiguous; call \.contig", {"values": SPREAD_IDS}),
        (ValueError, r"^num_rows must hold 1 elements", {"num_rows": torch.tensor([4, 4])}),
        (TypeError, r"^first_rows must be int64, got int32", {"first_rows": OFFSETS[:1].int()}),
        (ValueError, r"^on_bad_id must be a value of OnBadId, got 7$", {"on_bad_id": 7}),
        (
            TypeError,
            r"^rows_dtype must be int32 or int64, got int8$",
            {"rows_dtype": torch.int8},
        ),
    ],
    "shares_of_ids": [
        (TypeError, r"^ids must be int32 or int64, got float32", {"ids": WEIGHT[0]}),
        (ValueError, r"^ids must be contiguous; call \.contig", {"ids": SPREAD_IDS}),
        (ValueError, r"^num_shares must be positive and less than", {"num_shares": 0}),
    ],
    "encode_rows": [
        (ValueError, r"^rows must be contiguous; call \.contig", {"rows": WEIGHT.t()}),
        (ValueError, r"^rows must have at least one column", {"rows": WEIGHT[:, :0].contiguous()}),
    ],
    "scaled_rows": [(TypeError, r"^rows must be float32 or float16 or b", {"rows": IDS})],
    "decode_rows": [
        (TypeError, r"^codes must be uint8, got float32; take them", {"codes": WEIGHT}),
        (TypeError, r"^dtype must be float32, float16 or bfloat16", {"dtype": LONG}),
    ],
    "are_in_share": [
        (ValueError, r"^hotness must be 1 counts >= 0, .*, got \[-3\]$", {"hotness": [-3]}),
        (ValueError, r"^ids must hold 4 elements .sum.hotness. \* batch_size.", {"batch_size": 4}),
        (ValueError, r"^ids must be contiguous; call \.contig", {"ids": SPREAD_IDS}),
        (ValueError, r"^shares must hold 1 elements", {"shares": torch.tensor([4, 4])}),
        (TypeError, r"^num_shares must be int64, got int32", {"num_shares": OFFSETS[:1].int()}),
        (TypeError, r"^shares must be int64, got int32", {"shares": OFFSETS[:1].int()}),
        (ValueError, r"^shares must be on cpu as ids is, got meta", {"shares": NOT_THERE}),
    ],
    "locate_bad_id": [
        (ValueError, r"^values must hold at least one id, got none$", {"values": IDS[:0]}),
        (TypeError, r"^first_bad must be int64, got int32; take", {"first_bad": OFFSETS[:1].int()}),
        (ValueError, r"^first_bad must hold 1 elements", {"first_bad": OFFSETS}),
        (ValueError, r"^location must hold 4 elements", {"location": torch.zeros(2, dtype=LONG)}),
        (ValueError, r"^location must hold 2 elements", {"bounds": None}),
        (ValueError, r"^bounds must have 1 dim", {"bounds": OFFSETS.view(1, 3)}),
        (ValueError, r"^bounds must be on cpu as values is, got meta", {"bounds": NOT_THERE}),
        (
            ValueError,
            r"^location must be on the device of values, .*, or in pinned memory .*, got meta$",
            {"location": torch.zeros(4, dtype=LONG, device="meta")},
        ),
    ],
    "pooled_lookup_forward": [
        (
            ValueError,
            r"^hotness must be 2 counts >= 0, one for each feature, got \[2, -1\]$",
            {"hotness": [2, -1], "num_features": 2},
        ),
        (
            ValueError,
            r"^rows must hold 18446744073709551616 elements",
            {"hotness": [2**62], "batch_size": 4},
        ),
        (
            ValueError,
            r"^rows must hold 12 elements",
            {"hotness": [4]},
        ),
        (ValueError, r"^num_features must not be negative, got -1$", {"num_features": -1}),
        (ValueError, r"^batch_size must not be negative, got -3$", {"batch_size": -3}),
        (
            ValueError,
            r"^num_features \* batch_size must be less than 2\*\*31, got 1 \* 1099511627776;",
            {"hotness": [0], "batch_size": 2**40, "rows": IDS[:0]},
        ),
        (ValueError, r"^weight must be contiguous; call", {"weight": SPREAD}),
        (ValueError, r"^rows must be contiguous; call", {"rows": SPREAD_IDS}),
        (TypeError, r"^rows must be int32 or int64, got float32", {"rows": torch.ones(3)}),
        (ValueError, r"^per_id_weights must hold 3 elem", {"per_id_weights": ONE}),
        (ValueError, r"^per_id_weights must be contig", {"per_id_weights": ONE.expand(3)}),
        (TypeError, r"^output_dtype must be float32, float16 or", {"output_dtype": LONG}),
    ],
    "pooled_lookup_gradient_map": [
        (ValueError, r"^hotness must be 1 counts >= 0", {"hotness": [-3]}),
        (
            ValueError,
            r"^num_features \* batch_size must be less than 2\*\*31, got 1 \* 1099511627776;",
            {"hotness": [0], "batch_size": 2**40, "ids_like": IDS[:0]},
        ),
        (ValueError, r"^ids_like must hold 6 elements", {"hotness": [2]}),
        (ValueError, r"^per_id_weights must hold 3 elem", {"per_id_weights": ONE}),
        (ValueError, r"^ids_like must have 1 dimension", {"ids_like": IDS.view(1, 3)}),
    ],
    "pooled_lookup_weights_backward": [
        (ValueError, r"^hotness must be 1 counts >= 0", {"hotness": [-3]}),
        (ValueError, r"^grad must have 3 dimension", {"grad": torch.ones(3, 2)}),
        (ValueError, r"^grad must have 2 columns, got 3$", {"grad": torch.ones(3, 1, 3)}),
        (ValueError, r"^rows must hold 4 elements", {"grad": torch.ones(4, 1, 2)}),
        (ValueError, r"^grad must be contiguous", {"grad": SPREAD.unsqueeze(1)}),
    ],
    "sequence_lookup_forward": [
        (ValueError, r"^weight must have 2 dimension", {"weight": torch.ones(8)}),
        (ValueError, r"^weight must be contiguous", {"weight": SPREAD}),
        (ValueError, r"^rows must be contiguous", {"rows": SPREAD_IDS}),
        (TypeError, r"^rows must be int32 or int64, got int16", {"rows": IDS.short()}),
        (ValueError, r"^rows must be on cpu as weight is, got meta", {"rows": NOT_THERE}),
        (TypeError, r"^output_dtype must be float32, float16 or", {"output_dtype": LONG}),
    ],
    "find_runs": [
        (ValueError, r"^num_rows must not be negative, got -1$", {"num_rows": -1}),
        (ValueError, r"^rows must be contiguous", {"rows": SPREAD_IDS}),
        (ValueError, r"^rows must have 1 dimension", {"rows": IDS.view(1, 3)}),
        (TypeError, r"^rows must be int32 or int64, got int16", {"rows": IDS.short()}),
    ],
    "initialize_rows": [
        (ValueError, r"^rows must be contiguous", {"rows": torch.tensor([0]).expand(3)}),
        (ValueError, r"^tables must hold 3 elem", {"tables": torch.zeros(2, dtype=torch.int32)}),
        (ValueError, r"^parameters must have shape \(1, 2\)", {"parameters": torch.ones(2)}),
        (ValueError, r"^state1 must have shape \(4, 2\) or \(4,\)", {"state1": torch.ones(2)}),
    ],
    "rowwise_update": [
        (ValueError, r"^starts must hold 4 elements .*, got 3$", {"starts": RUNS["order"]}),
        (TypeError, r"^starts must be int32, got int64; take", {"starts": IDS}),
        (
            ValueError,
            r"^chunk_runs must hold 0 elements \(one for each 32 ids\), got 1$",
            {"chunk_runs": RUNS["num_runs"]},
        ),
        (
            ValueError,
            r"^unique_rows must hold 3 elements \(one for each id\), got 2$",
            {"unique_rows": IDS[:2]},
        ),
        (
            ValueError,
            r"^num_runs must hold 1 elements \(a scalar in a tensor\), got 3$",
            {"num_runs": RUNS["order"]},
        ),
        (
            ValueError,
            r"^order must be contiguous",
            {"order": torch.zeros(1, dtype=torch.int32).expand(3)},
        ),
        (ValueError, r"^grad must have 3 rows \(one for each id\), got 2$", {"grad": WEIGHT[:2]}),
        (ValueError, r"^grad must be contiguous", {"grad": SPREAD}),
        (ValueError, r"^scales must hold 3 elem", {"scales": ONE}),
        (ValueError, r"^gradient_rows must hold 3 elem", {"gradient_rows": IDS[:1]}),
        (ValueError, r"^state0 must be given for ADAGRAD, got None$", {"optimizer": 1}),
        (ValueError, r"^state0 must be None for SGD, got a tensor$", {"state0": WEIGHT}),
        (
            ValueError,
            r"^state1 must be given for ADAM, got None$",
            {"optimizer": 3, "state0": WEIGHT},
        ),
        (
            ValueError,
            r"^state0 must be contiguous \(4,\), got \(3,\)$",
            {"optimizer": 2, "state0": torch.ones(3)},
        ),
        (ValueError, r"^optimizer must be a value of OptimizerKind, got 9$", {"optimizer": 9}),
        (
            ValueError,
            r"^row_offsets and row_keys must be given together, got one of them$",
            {"row_keys": IDS, "step": ONE},
        ),
        (
            ValueError,
            r"^row_offsets must hold a number more than there are tables, so 2 or more, got 1$",
            {"row_offsets": IDS[:1], "row_keys": IDS[:0], "step": ONE},
        ),
        (ValueError, r"^lr must hold 1 elements", {"lr": torch.ones(2)}),
        (ValueError, r"^skip must hold 1 elements", {"skip": torch.ones(0)}),
    ],
    "dense_update": [
        (ValueError, r"^bounds must hold a begin and an end of each part", {"bounds": [0]}),
        (ValueError, r"^parts must begin at a multiple of 8 .* got \[0, 17\)", {"bounds": [0, 17]}),
        (ValueError, r"^parts must begin .* got \[-8, 8\)", {"bounds": [-8, 8]}),
        (ValueError, r"^state0 must be given for ADAGRAD, got None$", {"optimizer": 1}),
        (ValueError, r"^optimizer must be the value of SGD, ADAGRAD or ADAM", {"optimizer": 2}),
        (ValueError, r"^grad must hold 9 elements", {"grad": torch.ones(8)}),
        (ValueError, r"^grad must be contiguous", {"grad": ONE.expand(9)}),
        (
            ValueError,
            r"^rounded must hold 9 elements",
            {"rounded": torch.ones(8, dtype=torch.bfloat16)},
        ),
        (
            ValueError,
            r"^state0 must be on cpu as weight is, got meta",
            {"optimizer": 1, "state0": torch.ones(9, device="meta")},
        ),
    ],
    "permute_features_forward": [
        (ValueError, r"^permutation must hold features in \[0, 2\)", {"permutation": [2]}),
        (ValueError, r"^permutation must hold features in \[0, 2\)", {"permutation": [-1]}),
        (ValueError, r"^num_ids must not be negative, got -1$", {"num_ids": -1}),
        (ValueError, r"^offsets must hold 5 elements", {"batch_size": 2}),
        (ValueError, r"^weights must hold 3 elements", {"weights": ONE}),
        (ValueError, r"^values must be contiguous", {"values": SPREAD_IDS}),
    ],
    "permute_features_backward": [
        (ValueError, r"^new_offsets must hold 3 elements", {"new_offsets": IDS[:2]}),
        (ValueError, r"^num_values must not be negative, got -1$", {"num_values": -1}),
        (ValueError, r"^permutation must hold features in \[0, 2\)", {"permutation": [2]}),
        (ValueError, r"^grad must have 1 dimension", {"grad": torch.ones(3, 1)}),
    ],
    "bucketize_rows": [
        (
            ValueError,
            r"^boundaries must have a column more than there are buckets",
            {"boundaries": torch.tensor([[0]])},
        ),
        (ValueError, r"^offsets must hold 4 elements", {"batch_size": 3}),
        (ValueError, r"^batch_size must not be negative", {"batch_size": -2}),
        (ValueError, r"^weights must hold 3 elements", {"weights": ONE}),
        (ValueError, r"^values must be contiguous", {"values": SPREAD_IDS}),
    ],
}

MORE = (raw_cache_calls, raw_dense_calls, raw_hash_calls, raw_push_calls)
ALL_FITTING = FITTING | {name: call for calls in MORE for name, call in calls.FITTING.items()}
ALL_ERRORS = ERRORS | {name: cases for calls in MORE for name, cases in calls.ERRORS.items()}


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with the tensors that are on the CPU on ``device``, strides kept."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
        return tensor[once].to(device).expand_as(tensor)

    return map_tensors(moved, arguments)


@pytest.mark.parametrize("name", ALL_FITTING)
def test_takes_arguments_that_fit(name: str, device: torch.device) -> None:
    arguments = on(device, ALL_FITTING[name])
    getattr(torch.ops.torchembed, name)(**raw_push_calls.with_addresses(arguments))


@pytest.mark.parametrize(
    ("name", "index"),
    [(name, index) for name, cases in ALL_ERRORS.items() for index in range(len(cases))],
)
def test_refuses_what_does_not_fit(name: str, index: int, device: torch.device) -> None:
    error, message, changes = ALL_ERRORS[name][index]
    arguments = on(device, ALL_FITTING[name] | changes)
    message = message.replace("on cpu", f"on {torch.empty(0, device=device).device}")
    with pytest.raises(error, match=message):
        getattr(torch.ops.torchembed, name)(**arguments)


@pytest.mark.parametrize("name", ALL_ERRORS)
def test_refuses_while_tracing_too(name: str) -> None:
    for error, message, changes in ALL_ERRORS[name]:
        if "got meta" in message or "contig" in message:  # moving tensors changes these
            continue
        on_meta = map_tensors(lambda tensor: tensor.to("meta"), ALL_FITTING[name] | changes)
        with pytest.raises(error, match=message):
            getattr(torch.ops.torchembed, name)(**on_meta)
