"""Scratch: which shapes of the kernels are fastest."""

import itertools
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from torchembed.core.types import OptimizerKind
from torchembed.data import MLPERF_HOTNESS, MLPERF_TABLE_SIZES
from torchembed.data.skewed_ids import skewed_ids
from torchembed.ops.linearize_ids import linearize_ids
from torchembed.ops.pooled_lookup.schema import (
    pooled_lookup_forward_op,
    pooled_lookup_gradient_map_op,
)
from torchembed.ops.rowwise_update import RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.triton_kernels import (
    pooled_lookup as pl,
)
from torchembed.triton_kernels import (
    rowwise_update as ru,
)

D = 128
dev = torch.device("cuda")
hot = list(MLPERF_HOTNESS)
F = len(hot)
nrows = [min(s, 8_000_000) for s in MLPERF_TABLE_SIZES]
first = torch.tensor([0, *itertools.accumulate(nrows)])
R = int(first[-1])
first_rows, num_rows = first[:-1].to(dev), torch.tensor(nrows, device=dev)
weight = torch.empty(R, D, device=dev)
weight.uniform_(-0.1, 0.1)
state = torch.full((R, D), 0.1, device=dev)
row_state = torch.full((R,), 0.1, device=dev)
lr = torch.full((1,), 0.01, device=dev)
t0 = time.time()


def say(*a):
    print(*a, flush=True)


x = torch.empty(2**28, device=dev)
y = torch.empty_like(x)
for _ in range(3):
    y.copy_(x)
a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
a.record()
for _ in range(10):
    y.copy_(x)
b.record()
b.synchronize()
say("copy TB/s", 10 * 2 * x.numel() * 4 / a.elapsed_time(b) / 1e9, torch.cuda.get_device_name())
del x, y


def make(B, ids, k):
    parts = [
        skewed_ids(r, h * B, exponent=0.0 if ids == "uniform" else 1.05, seed=t, first=k * h * B)
        for t, (r, h) in enumerate(zip(nrows, hot))
    ]
    values = torch.cat(parts).to(dev)
    return linearize_ids(
        values, first_rows, num_rows, hotness=hot, batch_size=B, rows_dtype=torch.int32
    ).rows


def graph_us(calls, rounds=15):
    for c in calls[:1]:
        c()
    torch.cuda.synchronize()
    graphs = []
    for c in calls:
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            c()
        graphs.append(g)
    for g in graphs:
        g.replay()
    times = []
    for _ in range(rounds):
        a.record()
        for g in graphs:
            g.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(graphs))
    return statistics.median(times)


def profiled(call, n=3):
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            call()
        torch.cuda.synchronize()
    return [
        (e.key[:46], e.count // n, round(e.self_device_time_total / n, 1))
        for e in prof.key_averages()
        if e.self_device_time_total > 0
    ]


class With:
    def __init__(self, kernel, **kw):
        self.kernel, self.kw = kernel, kw

    def __getitem__(self, grid):
        return lambda *a, **k: self.kernel[grid](*a, **{**k, **self.kw})


FWD, RB = pl._pooled_lookup_forward_kernel, pl.row_block
UPD = ru._rowwise_update_kernel
fwd_variants = {}
for w, u, nreg in (
    (4, 4, None),
    (4, 8, 64),
    (4, 8, 48),
    (4, 4, 40),
    (8, 4, None),
    (8, 8, 64),
    (2, 4, None),
    (8, 4, 40),
):
    for sm in (0, 1):
        kw = {"SAMPLE_MAJOR": sm}
        if nreg:
            kw["maxnreg"] = nreg
        fwd_variants[f"w{w} u{u} n{nreg} s{sm}"] = (w, u, 4, kw)
fwd_variants["w4 u4 s1 evict"] = (4, 4, 4, {"SAMPLE_MAJOR": 1, "EVICT": "evict_first"})
fwd_variants["w4 u4 s0 evict"] = (4, 4, 4, {"SAMPLE_MAJOR": 0, "EVICT": "evict_first"})
fwd_variants["w4 u4 r2 s1"] = (4, 4, 2, {"SAMPLE_MAJOR": 1})
upd_variants = {}
for w, e, u, ps in (
    (1, 256, 4, (24, 32)),
    (1, 256, 2, (32, 10**6)),
    (1, 512, 2, (16, 32)),
    (1, 512, 4, (12,)),
    (1, 128, 4, (32,)),
    (2, 512, 2, (12, 16)),
    (4, 512, 4, (8, 12)),
    (4, 1024, 2, (4, 6)),
    (4, 1024, 1, (6, 10**6)),
    (8, 1024, 2, (4,)),
):
    for p in ps:
        upd_variants[f"w{w} e{e} u{u} p{p}"] = (w, e, u, p, "evict_first", {})
upd_variants["w1 e256 u2 p32 n64"] = (1, 256, 2, 32, "evict_first", dict(maxnreg=64))
upd_variants["w1 e256 u2 p32 noevict"] = (1, 256, 2, 32, "", {})
results = []
for B in (512, 2048, 8192):
    for ids in ("uniform", "zipf"):
        n = {512: 6, 2048: 4, 8192: 3}[B]
        sets = [make(B, ids, k) for k in range(n)]
        L = sets[0].numel()
        U = sets[0].unique().numel()
        fb = U * 512 + L * 4 + B * F * 256
        rwb, adb = L * 8 + B * F * 256 + U * 1032, L * 8 + B * F * 256 + U * 2048
        say(
            f"== B {B} {ids} L {L} U {U} floors us at 3.0: fwd {fb / 3e6:.1f} row-wise {rwb / 3e6:.1f} adagrad {adb / 3e6:.1f}  t={time.time() - t0:.0f}"
        )
        forward = lambda rows: pooled_lookup_forward_op(
            weight, rows, None, hot, None, F, B, False, torch.bfloat16
        )
        line = []
        for name, (w, u, r, kw) in fwd_variants.items():
            pl._FORWARD_WARPS, pl._UNROLL, pl._UNROLL_REST = w, u, r
            pl._pooled_lookup_forward_kernel = With(FWD, **kw)
            try:
                line.append((graph_us([lambda rows=rows: forward(rows) for rows in sets]), name))
            except Exception as e:
                say("fwd", name, repr(e)[:200])
        pl._FORWARD_WARPS, pl._UNROLL, pl._UNROLL_REST = 4, 4, 4
        pl._pooled_lookup_forward_kernel = FWD
        say("  fwd " + "  ".join(f"[{n_}] {t:.1f}" for t, n_ in sorted(line)))
        lin = graph_us(
            [
                lambda s=s: linearize_ids(
                    s.long(),
                    first_rows * 0,
                    num_rows * 0 + R,
                    hotness=hot,
                    batch_size=B,
                    rows_dtype=torch.int32,
                )
                for s in sets
            ]
        )
        runs = [find_runs(s, R) for s in sets]
        fr = graph_us([lambda s=s: find_runs(s, R) for s in sets])
        so = graph_us([lambda s=s: torch.sort(s, stable=True) for s in sets])
        gm = graph_us(
            [
                lambda s=s: pooled_lookup_gradient_map_op(s, None, hot, None, F, B, False)
                for s in sets
            ]
        )
        say(
            f"  linearize (+cast) {lin:.1f}  find_runs {fr:.1f} of it torch.sort {so:.1f}  gradient map {gm:.1f}"
        )
        grad = torch.randn(B * F, D, device=dev).to(torch.bfloat16)
        gr = pooled_lookup_gradient_map_op(sets[0], None, hot, None, F, B, False)[0]
        for kind, st in (
            (OptimizerKind.ROWWISE_ADAGRAD, row_state),
            (OptimizerKind.ADAGRAD, state),
        ):
            rule = UpdateRule(kind=kind)
            update = lambda r: rowwise_update(weight, (st,), r, RowGradients(grad, gr), rule, lr)
            line = [(graph_us([lambda r=r: update(r) for r in runs], 9), "CUDA")]
            say("     ", profiled(lambda: update(runs[1])))
            engine = ru._copy_engine_update
            ru._copy_engine_update = lambda: None
            for name, (w, e, u, p, ev, kw) in upd_variants.items():
                ru._NUM_WARPS, ru._BLOCK_ELEMENTS, ru._UNROLL, ru._PROGRAMS_PER_SM, ru._EVICT = (
                    w,
                    e,
                    u,
                    p,
                    ev,
                )
                ru._rowwise_update_kernel = With(UPD, **kw)
                try:
                    line.append((graph_us([lambda r=r: update(r) for r in runs], 9), name))
                except Exception as ex:
                    say("upd", name, repr(ex)[:200])
            ru._NUM_WARPS, ru._BLOCK_ELEMENTS, ru._UNROLL, ru._PROGRAMS_PER_SM, ru._EVICT = (
                1,
                256,
                2,
                32,
                "evict_first",
            )
            ru._rowwise_update_kernel = UPD
            say(f"  {kind.name} " + "  ".join(f"[{n_}] {t:.1f}" for t, n_ in sorted(line)))
            runs_kept = runs[1]
            ru._copy_engine_update = engine
            say("     ", profiled(lambda: update(runs[1])))
        if ids == "zipf" or B == 8192:
            for cw in (1, 4, 8):
                run_sums._CHUNK_WARPS = cw
                say("      chunk warps", cw, profiled(lambda: update(runs_kept)))
            run_sums._CHUNK_WARPS = 4
        say("      find_runs", profiled(lambda: find_runs(sets[1], R)))
        del sets, runs, grad, gr
say("done", time.time() - t0)
