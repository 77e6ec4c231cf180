"""Compares DLRM-DCNv2's dense part on one GPU with plain PyTorch: forward, backward, optimizer.

``python -m bench.dense.passes`` prints milliseconds of CUDA graphs that hold a forward and
backward, or a step of an optimizer, and writes them to ``bench/results/dense.json``. The systems
alternate on the same inputs and weights, and a figure is printed only if loss and gradients are
right: against float64, no more than three times as wrong as plain PyTorch in the same precision.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.data.dlrm_dcnv2 import DIM, FLOPS_PER_SAMPLE, NUM_DENSE, WIDTH
from bench.dense.dense_part import DensePart, ours, plain
from bench.planning.step_floor import RATES
from bench.report.result_file import Row, write_results
from torchembed.autograd.weight_gradients import DeferredWeightGradients
from torchembed.optim import DenseAdagrad, DenseAdam, DenseSGD

PEAK = RATES["H100"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the measurements."""

    batch_sizes: tuple[int, ...] = (512, 2048, 8192)
    precisions: tuple[str, ...] = ("bf16", "tf32")
    compile: bool = True
    """Also plain PyTorch under ``torch.compile``."""
    num_rounds: int = 20
    """Rounds in which the systems alternate; 20 replays of a graph in each."""
    output: Path = Path("bench/results/dense.json")
    profile: Path | None = None
    """Folder for tables of each system's kernels and their times."""


@dataclasses.dataclass(kw_only=True)
class System:
    """A dense part and its inputs, and how to run backward."""

    name: str
    model: Callable[..., Tensor]
    parameters: list[nn.Parameter]
    inputs: tuple[Tensor, Tensor, Tensor]
    deferred: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def run(self) -> Tensor:
        """Forward and backward; leaves new gradients, and returns the loss."""
        for tensor in (*self.parameters, self.inputs[1]):
            tensor.grad = None
        with self.deferred():
            loss = self.model(*self.inputs)
            loss.backward()
        return loss

    def results(self) -> list[Tensor]:
        """The loss and every gradient."""
        found = [self.run().detach()]
        for tensor in (self.inputs[1], *self.parameters):
            assert tensor.grad is not None
            found.append(tensor.grad.clone())
        return found


def systems(config: Config, batch_size: int, dtype: torch.dtype) -> list[System]:
    """All systems, with the same weights and inputs."""
    generator = torch.Generator("cuda").manual_seed(batch_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    dense, pooled = normal(batch_size, NUM_DENSE), normal(batch_size, WIDTH - DIM) / 4
    labels = (normal(batch_size) > 0).float()
    state = ours().state_dict()
    found = []

    def add(
        name: str,
        model: nn.Module,
        to: torch.dtype,
        deferred: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> System:
        model.load_state_dict(state)
        model.to("cuda", to)
        if name.startswith("torchembed"):
            # Gives the gradients their flat buffer; no step is made.
            DenseSGD(model.parameters())
        inputs = (dense.to(to), pooled.to(to).requires_grad_(), labels.to(to))
        parameters = list(model.parameters())
        found.append(
            System(name=name, model=model, parameters=parameters, inputs=inputs, deferred=deferred)
        )
        return found[-1]

    add("float64", plain(), torch.float64)
    add("torch", plain(), dtype)
    if config.compile:
        compiled = add("torch.compile", plain(), dtype)
        torch._dynamo.reset()
        compiled.model = torch.compile(compiled.model, dynamic=False)
    add("torchembed", ours(), dtype)
    side = torch.cuda.Stream()
    add("torchembed, side stream", ours(), dtype, deferred=lambda: DeferredWeightGradients(side))
    return found


def relative_errors(system: System, exact: Sequence[Tensor]) -> list[float]:
    """The error of the loss and of each gradient, as a part of its norm."""
    return [
        float((found.double() - true).norm() / true.norm().clamp_min(1e-30))
        for found, true in zip(system.results(), exact, strict=True)
    ]


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(replays: Sequence[Callable[[], None]], num_rounds: int) -> list[list[float]]:
    """Milliseconds of each replay; they alternate, 20 replays at a time."""
    times: list[list[float]] = [[] for _ in replays]
    for replay in replays:
        for _ in range(10):
            replay()
    for _ in range(num_rounds):
        for replay, seen in zip(replays, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            start.record()
            for _ in range(20):
                replay()
            end.record()
            end.synchronize()
            seen.append(start.elapsed_time(end) / 20)
    return times


def row(times: list[float], floor: float, **what: object) -> Row:
    median = statistics.median(times)
    return {
        **what,
        "ms_median": round(median, 4),
        "ms_min": round(min(times), 4),
        "ms_max": round(max(times), 4),
        "floor_fraction": round(floor / median, 3),
    }


def forward_backward(config: Config, batch_size: int, precision: str) -> list[Row]:
    """A row for each system that is right."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    exact, *timed = systems(config, batch_size, dtype)
    truth = exact.results()
    allowed: list[float] = []
    graphs, right, errors = [], [], []
    for system in timed:
        found = relative_errors(system, truth)
        if system.name == "torch":
            eps = torch.finfo(dtype).eps if precision != "tf32" else 2.0**-10
            allowed = [3 * error + eps for error in found]
        wrong = [i for i, (e, most) in enumerate(zip(found, allowed, strict=True)) if not e <= most]
        if wrong:
            print(f"{system.name} is wrong: results {wrong}, errors {[found[i] for i in wrong]}")
            continue
        if config.profile is not None:
            write_profile(system, config.profile / f"{system.name}-{precision}-{batch_size}.txt")
        graphs.append(captured(system.run))
        right.append(system)
        errors.append(max(found))
    what = {
        "bench": "dense",
        "part": "forward and backward",
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": 1,
        "batch_per_gpu": batch_size,
        "precision": precision,
    }
    flops_rate = PEAK.flops if dtype.itemsize == 2 else PEAK.flops / 2
    floor = 1e3 * batch_size * FLOPS_PER_SAMPLE / flops_rate
    return [
        row(times, floor, system=system.name, max_relative_error=error, **what)
        for system, error, times in zip(
            right, errors, milliseconds(graphs, config.num_rounds), strict=True
        )
    ]


def write_profile(system: System, path: Path) -> None:
    """The kernels of one forward and backward, by total time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    system.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            system.run()
        torch.cuda.synchronize()
    table = profile.key_averages().table(
        sort_by="cuda_time_total", row_limit=80, max_name_column_width=110
    )
    path.write_text(table)


class OptimizerCase(NamedTuple):
    """An optimizer of ours and torch's counterpart."""

    name: str
    ours: Callable[..., torch.optim.Optimizer]
    torchs: Callable[..., torch.optim.Optimizer]
    arguments: dict[str, float]
    bytes_per_element: int
    """That an update moves in float32; our bfloat16 parameters and gradients over float32 masters
    move as many."""


OPTIMIZERS = (
    OptimizerCase("Adagrad", DenseAdagrad, torch.optim.Adagrad, {"lr": 0.004, "eps": 1e-8}, 20),
    OptimizerCase("SGD", DenseSGD, torch.optim.SGD, {"lr": 0.01}, 12),
    OptimizerCase("Adam", DenseAdam, torch.optim.Adam, {"lr": 0.001}, 28),
)


def after_one_step(
    dtype: torch.dtype, optimizer_of: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[DensePart, torch.optim.Optimizer]:
    """The dense part and its optimizer, after a step with gradients that are always the same."""
    torch.manual_seed(0)
    model = ours().cuda().to(dtype)
    optimizer = optimizer_of(model.parameters())
    generator = torch.Generator("cuda").manual_seed(1)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, device="cuda", generator=generator)
        parameter.grad = grad.bfloat16().to(parameter.dtype)
    optimizer.step()
    return model, optimizer


def optimizer_steps(config: Config, case: OptimizerCase) -> list[Row]:
    """A row for each optimizer that is right: its step over the parameters of the dense part."""
    arguments = case.arguments
    capturable = {"capturable": True} if case.name == "Adam" else {}
    exact, _ = after_one_step(torch.float64, lambda p: case.torchs(p, **arguments))
    runs = {
        ("torch", "fp32"): lambda p: case.torchs(p, foreach=True, **arguments, **capturable),
        ("torchembed", "fp32"): lambda p: case.ours(p, **arguments),
        ("torchembed", "bf16"): lambda p: case.ours(p, dtype=torch.bfloat16, **arguments),
    }
    right = {}
    for key, run in runs.items():
        model, optimizer = after_one_step(torch.float32, run)
        error = max(
            float((found.detach().double() - true.detach()).abs().max() / true.detach().abs().max())
            for found, true in zip(model.parameters(), exact.parameters(), strict=True)
        )
        # Torch's capturable Adam loses some of its corrections to float32.
        if error <= (1e-4 if key[1] == "fp32" else torch.finfo(torch.bfloat16).eps):
            right[key] = optimizer
        else:
            print(f"{case.name} of {key} is wrong: error {error}")
    num_bytes = case.bytes_per_element * sum(p.numel() for p in exact.parameters())
    floor = 1e3 * num_bytes / PEAK.bytes
    what = {"bench": "dense", "part": "optimizer", "optimizer": case.name}
    what |= {"gpu": torch.cuda.get_device_name(), "num_gpus": 1}
    replays = [captured(optimizer.step) for optimizer in right.values()]
    return [
        row(times, floor, system=system, precision=precision, **what)
        for (system, precision), times in zip(
            right, milliseconds(replays, config.num_rounds), strict=True
        )
    ]


def main(config: Config) -> None:
    """Measure, print and write."""
    rows = [entry for case in OPTIMIZERS for entry in optimizer_steps(config, case)]
    for precision in config.precisions:
        for batch_size in config.batch_sizes:
            rows += forward_backward(config, batch_size, precision)
    for entry in rows:
        where = entry.get("batch_per_gpu", entry.get("optimizer"))
        print(
            f"{entry['part']:21} {where!s:8} {entry['precision']:5} {entry['system']:24}"
            f"{entry['ms_median']:9.4f} ms ({entry['ms_min']:.4f} to {entry['ms_max']:.4f}), "
            f"{entry['floor_fraction']:.0%} of the floor's speed"
        )
    write_results(config.output, rows)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
