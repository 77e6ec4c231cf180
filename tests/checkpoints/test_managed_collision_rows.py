"""Buffers as TorchRec's managed collision modules have them become rows by id."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.support.row_chunks import Row, rows_by_key
from torchembed.checkpoints import managed_collision_rows

NONE = 2**63 - 1
PREFIX = "collisions.user."
WEIGHT = torch.arange(12.0).reshape(6, 2)


def sorted_state(**changes: Tensor) -> dict[str, Tensor]:
    """Of an MCH module that holds three ids in six rows."""
    state = {
        "_mch_sorted_raw_ids": torch.tensor([-(2**63), -1, 0, NONE, NONE, NONE]),
        "_mch_remapped_ids_mapping": torch.tensor([4, 0, 2, 1, 3, 5]),
        "_mch_counts": torch.tensor([7, 8, 9, 0, 0, NONE]),
        "_mch_last_access_iter": torch.tensor([3, 2, 1, 0, 0, 0]),
    }
    return {PREFIX + name: tensor for name, tensor in (state | changes).items()}


def probed_state(**changes: Tensor) -> dict[str, Tensor]:
    """Of an MPZCH module that holds three ids in six rows."""
    state = {
        "_hash_zch_identities": torch.tensor([[-1], [0], [-1], [NONE], [-(2**63)], [-1]]),
        "_hash_zch_metadata": torch.tensor([[-1], [50], [-1], [51], [52], [-1]], dtype=torch.int32),
        "_hash_zch_runtime_meta": torch.tensor([[0], [5], [0], [6], [7], [0]]),
        "_hash_zch_bucket": torch.tensor([[2]]),
    }
    return {PREFIX + name: tensor for name, tensor in (state | changes).items()}


@pytest.mark.parametrize("chunk_bytes", [1, 70, 1 << 20])
def test_sorted_ids_come_with_their_rows(chunk_bytes: int) -> None:
    states = {"sum": torch.arange(6.0), "exp_avg": -WEIGHT}
    source = managed_collision_rows(
        sorted_state(),
        torch.nn.Parameter(WEIGHT),
        prefix=PREFIX,
        states=states,
        chunk_bytes=chunk_bytes,
    )
    assert (source.num_rows, source.embedding_dim) == (3, 2)

    def row(number: int, score: int, touched: int) -> Row:
        values = WEIGHT[number].tolist()
        return Row(values, {"sum": number, "exp_avg": [-v for v in values]}, score, touched)

    expected = {-(2**63): row(4, 7, 3), -1: row(0, 8, 2), 0: row(2, 9, 1)}
    assert rows_by_key(source) == rows_by_key(source) == expected
    num_rows = max(chunk_bytes // (2 * 4 + 4 + 2 * 4 + 3 * 8), 1)
    assert [len(chunk.keys) for chunk in source] == [
        min(num_rows, 3 - first) for first in range(0, 3, num_rows)
    ]


def test_probed_ids_come_with_their_rows() -> None:
    rows = rows_by_key(managed_collision_rows(probed_state(), WEIGHT, prefix=PREFIX))
    assert rows == {
        0: Row([2.0, 3.0], {}, 50, None),
        NONE: Row([6.0, 7.0], {}, 51, None),
        -(2**63): Row([8.0, 9.0], {}, 52, None),
    }
    counts = managed_collision_rows(
        probed_state(), WEIGHT, prefix=PREFIX, scores="_hash_zch_runtime_meta"
    )
    assert [row.score for row in rows_by_key(counts).values()] == [5, 6, 7]
    without = {n: t for n, t in probed_state().items() if "metadata" not in n}
    source = managed_collision_rows(without, WEIGHT, prefix=PREFIX)
    assert [row.score for row in rows_by_key(source).values()] == [None] * 3


def test_the_part_of_a_rank_counts_from_its_first_row() -> None:
    state = sorted_state(_mch_remapped_ids_mapping=torch.tensor([4, 0, 2, 1, 3, 5]) + 12)
    source = managed_collision_rows(state, WEIGHT, prefix=PREFIX, first_row=12)
    assert rows_by_key(source)[-1].values == WEIGHT[0].tolist()


def test_modules_without_ids_give_a_chunk_without_rows() -> None:
    for state in (
        sorted_state(_mch_sorted_raw_ids=torch.full((6,), NONE)),
        probed_state(_hash_zch_identities=torch.full((6, 1), -1)),
    ):
        source = managed_collision_rows(state, WEIGHT, prefix=PREFIX)
        assert source.num_rows == 0
        assert [chunk.rows.shape for chunk in source] == [(0, 2)]


def test_what_does_not_fit_is_named() -> None:
    def refused(
        message: str, state: Mapping[str, Tensor], weight: Tensor = WEIGHT, **arguments: object
    ) -> None:
        with pytest.raises(ValueError, match=message):
            managed_collision_rows(state, weight, **({"prefix": PREFIX} | arguments))

    refused(
        r"under prefix '', and holds them under \['collisions.user.'\]", sorted_state(), prefix=""
    )
    without = {n: t for n, t in sorted_state().items() if "mapping" not in n}
    refused("must hold _mch_remapped_ids_mapping under prefix", without)
    refused("must hold no_such under prefix", sorted_state(), scores="no_such")
    refused(r"_mch_counts must be integers \[6\]", sorted_state(_mch_counts=torch.zeros(5).long()))
    refused(
        "_mch_counts must be integers .* got torch.float32",
        sorted_state(_mch_counts=torch.zeros(6)),
    )
    refused(r"identities must be integers \[Z\]", probed_state(_hash_zch_identities=WEIGHT.long()))
    refused(r"must name rows in \[0, 4\), which weight has, got 0 to 4", sorted_state(), WEIGHT[:4])
    refused(
        r"must name rows in \[1, 7\), which weight has, got 0 to 4", sorted_state(), first_row=1
    )
    refused(r"must name rows in \[0, 3\)", probed_state(), WEIGHT[:3])
    refused(
        "each id a row of its own, got row 4 twice",
        sorted_state(_mch_remapped_ids_mapping=torch.tensor([4, 4, 2, 1, 3, 5])),
    )
    twice = torch.tensor([0, 0, 5, NONE, NONE, NONE])
    refused("must hold each key once, and holds 0 in", sorted_state(_mch_sorted_raw_ids=twice))
    refused(r"weight must be \[R, D\]", sorted_state(), WEIGHT[0])
    refused("sum must have 6 rows", sorted_state(), states={"sum": torch.zeros(5)})
    refused("chunk_bytes must be at least 1", sorted_state(), chunk_bytes=0)
