"""Vectors and gradients that travel in 8 or 16 bits: how far off, and equal wherever they are."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.sharded_cases import Case, make_batch, make_model, vectors_of
from tests.support.tolerance import assert_same_bits
from tests.support.values import normal
from torchembed.ops.row_codec import decode_rows, encode_rows
from torchembed.sharding import H200, Planner, Topology, WirePrecision, WireTransport
from torchembed.sharding.transport.sent_lines import SentLines, decoded, encoded
from torchembed.sharding.wire import check_wire

NUM_RANKS = 4
WHOLE_ROWS = {"a": "column_wise", "b": "table_wise", "c": "column_wise", "d": "table_wise"}
WHOLE_WIDTHS = [2] * 8 + [8] + [2, 2, 1] + [8]
"""Columns of the vectors that ranks send, in the order of the features' tables."""
DIVIDED_ROWS = {"a": "row_wise", "b": "table_row_wise", "c": "row_wise", "d": "data_parallel"}
POOLED = Case(placements=WHOLE_ROWS)
POOLED_DIVIDED = Case(placements=DIVIDED_ROWS, fixed=True)
SEQUENCES = Case(placements=DIVIDED_ROWS | {"d": "column_wise"}, pooled=False)
E4M3 = torch.float8_e4m3fn
NARROW = (torch.float16, torch.bfloat16, E4M3)
LOST = {torch.float16: 2.0**-39, torch.bfloat16: 2.0**-39, E4M3: 2.0**-16}
"""What a gradient far below the largest loses, as a part of that."""
SIZES = (1.0, 1e-12, 1e9)
"""Sizes of gradients: float16 alone would make zeros of the second and infinities of the third."""


def sharded_model(case: Case, wire: WirePrecision, top: nn.Module | None = None) -> nn.Module:
    model = make_model(case, "meta")
    model.top = top or nn.Identity()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return torchembed.shard_embeddings(model, mesh, case.plan(NUM_RANKS), wire=wire)


def coefficients_like(vectors: Tensor) -> Tensor:
    """Numbers of many magnitudes from -1 to 1."""
    return torch.linspace(-1, 1, vectors.numel()) ** 7


def on_a_rank() -> dict[str, Any]:
    return {
        "vectors": vectors_by_wire(),
        "gradients": gradients_by_wire(),
        "infinite": [infinite_gradients(dtype) for dtype in (None, torch.float16, E4M3)],
        "replicated": replicated_after_training(),
    }


def vectors_by_wire() -> dict[tuple[Case, torch.dtype | None], list[Any]]:
    """This rank's vectors of its own batch, and of the one of the rank opposite."""
    rank = dist.get_rank()
    found = {}
    for name, case in (("whole", POOLED), ("divided", POOLED_DIVIDED), ("sequences", SEQUENCES)):
        for dtype in (None, torch.float32, *NARROW):
            model = sharded_model(case, WirePrecision(forward=dtype))
            found[name, dtype] = [
                vectors_of(model.tables(make_batch(case, number, 0))).detach().numpy()
                for number in (rank, NUM_RANKS - 1 - rank)
            ]
    return found


def gradients_by_wire() -> dict[tuple[float, torch.dtype | None], dict[str, Any]]:
    """Gradients of whole tables, by the ranks that hold them; forward in another precision."""
    found = {}
    for size in SIZES:
        for dtype in (None, *NARROW):
            wire = WirePrecision(forward=torch.bfloat16, backward=dtype)
            model = sharded_model(Case(placements=dict.fromkeys("abcd", "table_wise")), wire)
            vectors = vectors_of(model.tables(make_batch(POOLED, dist.get_rank(), 0)))
            (vectors * coefficients_like(vectors) * size).sum().backward()
            found[size, dtype] = {
                table.spec.name: table.parameter.grad.numpy()
                for table in model.tables._local.values()
            }
    return found


def infinite_gradients(dtype: torch.dtype | None) -> list[Any]:
    """Gradients of what this rank holds where one element of one rank's is infinite."""
    model = sharded_model(POOLED, WirePrecision(backward=dtype))
    vectors = vectors_of(model.tables(make_batch(POOLED, dist.get_rank(), 0)))
    coefficients = torch.ones_like(vectors)
    if dist.get_rank() == 1:
        coefficients[0] = torch.inf
    (vectors * coefficients).sum().backward()
    return [table.parameter.grad.numpy() for table in model.tables._local.values()]


def replicated_after_training() -> list[Any]:
    """Dense parameters and a data-parallel table after three steps."""
    torch.manual_seed(dist.get_rank())
    wire = WirePrecision(forward=torch.bfloat16, backward=torch.float16)
    model = sharded_model(POOLED_DIVIDED, wire, nn.Linear(37, 1))
    optimizers = [
        torchembed.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.Adagrad(model.top.parameters(), lr=0.1),
    ]
    for step in range(3):
        vectors = model.tables(make_batch(POOLED_DIVIDED, dist.get_rank(), step)).values()
        optimizers[1].zero_grad()
        model.top(vectors).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    replicated = [*model.top.parameters(), model.tables.embedding_bags["d"].weight]
    return [parameter.detach().numpy() for parameter in replicated]


def sums_of_magnitudes(case: Case, rank: int) -> Tensor:
    """For each pooled element the sum of the magnitudes that are pooled."""
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    return vectors_of(model.tables(make_batch(case, rank, 0))).detach()


def check_vectors(of_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(of_ranks):
        for (name, dtype), (mine, _) in results["vectors"].items():
            of_opposite = of_ranks[NUM_RANKS - 1 - rank]["vectors"][name, dtype][1]
            np.testing.assert_array_equal(mine, of_opposite, err_msg=f"{name} {dtype}")
            plain = torch.from_numpy(results["vectors"][name, None][0])
            if dtype in (None, torch.float32):
                assert torch.equal(torch.from_numpy(mine), plain)
            elif name == "divided":
                # What each rank adds is rounded, by at most half an eps of it or of the smallest
                # normal number; the rest is the order in which at most 4 numbers are added. In e4m3
                # that number is, of the vector's largest, at most 2**-15.
                total, finfo = sums_of_magnitudes(POOLED_DIVIDED, rank), torch.finfo(dtype)
                smallest = finfo.smallest_normal if dtype is not E4M3 else 2.0**-15 * total.max()
                allowed = finfo.eps / 2 * (total + NUM_RANKS * smallest)
                allowed += 2 * 4 * torch.finfo(torch.float32).eps * total
                errors = (torch.from_numpy(mine) - plain).abs()
                assert (errors <= allowed).all()
                assert errors.any()
            elif name == "whole":
                # Table b, in columns 16 to 23, takes means after the way home: a division more.
                is_mean = (torch.arange(plain.numel()) % 37).div(8, rounding_mode="floor") == 2
                rounded, wired = as_sent(plain, dtype), torch.from_numpy(mine)
                assert torch.equal(wired[~is_mean], rounded[~is_mean])
                finfo, errors = torch.finfo(dtype), (wired - plain).abs()
                smallest = (
                    finfo.smallest_normal if dtype is not E4M3 else 2.0**-15 * plain.abs().max()
                )
                allowed = finfo.eps / 2 * (plain.abs() + smallest)
                allowed += 2 * torch.finfo(torch.float32).eps * plain.abs()
                assert (errors <= allowed)[is_mean].all()
                assert errors[is_mean].any()
            else:
                wired = torch.from_numpy(mine)
                if dtype is E4M3:
                    limit = torch.maximum(2.0**-4 * plain.abs(), 2.0**-16 * plain.abs().max())
                    assert ((wired - plain).abs() <= limit).all() and (wired != plain).any()
                else:
                    assert torch.equal(wired, plain.to(dtype).float())


def as_sent(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Pooled ``vectors`` of whole rows after a way in ``dtype``."""
    if dtype is not E4M3:
        return vectors.to(dtype).float()
    parts = vectors.view(-1, sum(WHOLE_WIDTHS)).split(WHOLE_WIDTHS, dim=1)
    decoded = [decode_rows(encode_rows(part), torch.float32) for part in parts]
    return torch.cat(decoded, dim=1).flatten()


def check_gradients(of_ranks: list[dict[str, Any]]) -> None:
    model = make_model(POOLED)
    total = torch.zeros(())
    for rank in range(NUM_RANKS):
        vectors = vectors_of(model.tables(make_batch(POOLED, rank, 0)))
        total = total + (vectors * coefficients_like(vectors).abs()).sum() / NUM_RANKS
    total.backward()
    magnitudes = {table.spec.name: table.parameter.grad for table in model.tables._tables}
    most_ids = sum(make_batch(POOLED, rank, 0).values.numel() for rank in range(NUM_RANKS))
    seen = set()
    for results in of_ranks:
        for (size, dtype), tables in results["gradients"].items():
            for name, gradient in tables.items():
                seen.add(name)
                plain = results["gradients"][size, None][name].astype(np.float64)
                if dtype is None:
                    continue
                sums = magnitudes[name].double().numpy() * size
                lost = most_ids * LOST[dtype] * size / NUM_RANKS
                reordering = 2 * most_ids * torch.finfo(torch.float32).eps
                allowed = (torch.finfo(dtype).eps / 2 + reordering) * sums + lost
                errors = np.abs(gradient - plain)
                assert (errors <= allowed).all(), f"{name}, {dtype}, {size}: {errors.max()}"
                assert errors.any()
    assert seen == set("abcd")


def test_what_travels_in_few_bits() -> None:
    of_ranks = run_on_ranks(NUM_RANKS, on_a_rank)
    check_vectors(of_ranks)
    check_gradients(of_ranks)
    infinities = 0
    for results in of_ranks:
        for expected, gradient, in_8_bits in zip(*results["infinite"], strict=True):
            np.testing.assert_array_equal(gradient, expected)
            infinities += np.isinf(gradient).sum()
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(np.isnan(in_8_bits), ~finite)
            np.testing.assert_allclose(in_8_bits[finite], expected[finite], rtol=2.0**-4)
        for ours, theirs in zip(results["replicated"], of_ranks[0]["replicated"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert infinities


def test_a_wire_of_another_dtype_is_refused() -> None:
    message = (
        "^backward of the wire must be float32, float16, bfloat16, float8_e4m3fn or None, got "
        "torch.float64$"
    )
    with pytest.raises(TypeError, match=message):
        WirePrecision(backward=torch.float64)


def test_push_refuses_8_bits() -> None:
    message = (
        "^backward of the wire must be float32, float16, bfloat16 or None under "
        "WireTransport.PUSH, got torch.float8_e4m3fn; use WireTransport.COLLECTIVE$"
    )
    wire, topology = WirePrecision(backward=E4M3), Topology.of_hardware(H200, ranks_per_node=2)
    with pytest.raises(ValueError, match=message):
        check_wire(wire, WireTransport.PUSH)
    with pytest.raises(ValueError, match=message):
        Planner().plan({}, topology, wire=wire, transport=WireTransport.PUSH)
    check_wire(WirePrecision(forward=torch.float16), WireTransport.PUSH)


LINES = st.builds(
    SentLines, st.integers(0, 3), st.lists(st.sampled_from([1, 3, 8]), max_size=4).map(tuple)
)


@given(st.lists(LINES, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_lines_are_encoded_vector_by_vector(sent: list[SentLines], dtype: torch.dtype) -> None:
    widths = [width for lines in sent for _ in range(lines.num_lines) for width in lines.widths]
    elements = normal(sum(widths), seed=len(widths), dtype=dtype)
    codes = encoded(elements, sent)
    assert codes.shape == (sum(lines.num_codes for lines in sent),)
    one_by_one = [encode_rows(vector.unsqueeze(0))[0] for vector in elements.split(widths)]
    assert codes.tolist() == [code for vector in one_by_one for code in vector.tolist()]
    expected = [decode_rows(codes.unsqueeze(0), dtype)[0] for codes in one_by_one]
    assert_same_bits(decoded(codes, sent, dtype), torch.cat([elements[:0], *expected]))
