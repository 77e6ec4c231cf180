"""The picture of a step, drawn from a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.step import timeline

NAMES = ("_pooled_lookup_forward_kernel", "nvjet_sm90_tst_64x64", "ncclDevKernel_AllReduce")


def event(name: str, start: float, launch: int, stream: int) -> dict[str, Any]:
    arguments = {"correlation": launch}
    return {
        "cat": "kernel", "name": name, "tid": stream, "ts": start, "dur": 5.0, "args": arguments
    }  # fmt: skip


def trace(kernels_a_launch: int) -> dict[str, Any]:
    """Three steps of 30 kernels, 10 µs each, on two streams; a copy of another launch between."""
    events = [
        event(NAMES[k % 3], 300.0 * step + 10 * k, 100 * step + k // kernels_a_launch, k % 2)
        for step in range(3)
        for k in range(30)
    ]
    copy = event("Memcpy HtoD", 305.0, 999, 7) | {"cat": "gpu_memcpy"}
    return {"traceEvents": [*events, copy, {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0}]}


@pytest.mark.parametrize("kernels_a_launch", [30, 1])
def test_a_step_is_cut_out_of_graphs_or_of_the_time(kernels_a_launch: int) -> None:
    step = timeline.one_step(timeline.kernels_of(trace(kernels_a_launch)), num_steps=3)
    assert [kernel.start for kernel in step] == [
        300.0,
        305.0,
        *(300.0 + 10 * k for k in range(1, 30)),
    ]
    lanes = timeline.lanes_of(step)
    assert [(lane[0].stream, len(lane)) for lane in lanes] == [(0, 15), (7, 1), (1, 15)]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (NAMES[0], "lookup"),
        (NAMES[1], "matrix products"),
        (NAMES[2], "reduction over GPUs"),
        ("ncclDevKernel_SendRecv", "exchange between GPUs"),
        ("_rowwise_update_kernel", "row update"),
        ("void torchembed::(anonymous namespace)::update_kernel<float, true>", "row update"),
        ("split_embedding_backward_adagrad_cta_per_row", "row update"),
        ("_move_rows_kernel", "rows to and from the host"),
        ("_exchange_places_kernel", "rows to and from the host"),
        ("_claim_slots_search_kernel", "slots of caches"),
        ("_find_cached_kernel", "slots of caches"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::reduce_kernel", "other"),
    ],
)
def test_kernels_have_stages(name: str, stage: str) -> None:
    assert timeline.Kernel(name, 0, 0.0, 1.0, 0).stage == stage


def test_what_a_stage_takes_and_what_hides_it() -> None:
    kernels = [
        timeline.Kernel("_move_rows_kernel", 1, 0.0, 10.0, 0),
        timeline.Kernel("nvjet", 2, 2.0, 4.0, 0),
        timeline.Kernel("nvjet", 3, 3.0, 4.0, 0),
        timeline.Kernel("nvjet", 2, 12.0, 3.0, 0),
    ]
    assert timeline.times_of(kernels) == {
        "rows to and from the host": (10.0, 5.0),  # 0 to 2 and 7 to 10
        "matrix products": (8.0, 3.0),  # 2 to 7, 12 to 15
    }


def test_a_picture_is_a_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, picture = tmp_path / "step.json", tmp_path / "step.png"
    source.write_text(json.dumps(trace(30)))
    monkeypatch.setattr("sys.argv", ["timeline", str(source), str(picture)])
    timeline.main()
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step: 0.295 ms; ")
    # The copy runs between two kernels.
    assert out[-1].split() == ["copies", "0.005", "0.005"] and len(out) == 5
    source.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(SystemExit, match=r"step\.json holds no kernels of a GPU"):
        timeline.main()
