"""Answers of onnxruntime, from a file of ``export_onnx``, beside those of eager PyTorch on the CPU.

``python -m bench.export`` gives both one thread and takes turns, so that other work of the machine
slows both; the ratio is of their medians. With ``--parity`` it compares the answers themselves.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from bench.export_parity import print_parity
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from torchembed.export import export_onnx
from torchembed.models import DLRM, DLRM_DCNv2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the measurement."""

    batch_sizes: tuple[int, ...] = (1, 128, 2048)
    kinds: tuple[str, ...] = ("one id", "fixed", "jagged")
    """Bags of one id, of ``hotness`` ids, and of up to twice as many."""
    num_features: int = 26
    num_rows: int = 50_000
    """Rows of each table."""
    dim: int = 32
    hotness: int = 10
    """Ids of a sample in fixed bags, and the mean of jagged ones."""
    num_turns: int = 30
    parity: bool = False
    """Whether answers are compared, for each of the library's models, and nothing is measured."""


def _bags(setting: Setting) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t{n}",
                num_embeddings=setting.num_rows,
                embedding_dim=setting.dim,
                feature_names=(f"f{n}",),
            )
            for n in range(setting.num_features)
        ]
    )


def _models(setting: Setting) -> dict[str, nn.Module]:
    dense = [512, 256, setting.dim]
    over = [512, 256, 1]
    return {
        "DLRM": DLRM(_bags(setting), 13, dense, over).eval(),
        "DLRM-DCNv2": DLRM_DCNv2(_bags(setting), 13, dense, over, 3, 64).eval(),
    }


def _batch(setting: Setting, batch_size: int, kind: str) -> tuple[Tensor, SparseFeatures]:
    keys = tuple(f"f{n}" for n in range(setting.num_features))
    num_bags = batch_size * setting.num_features
    dense = torch.randn(batch_size, 13)
    if kind == "jagged":
        lengths = torch.randint(2 * setting.hotness + 1, (num_bags,))
        ids = torch.randint(setting.num_rows, (int(lengths.sum()),))
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        return dense, SparseFeatures(keys=keys, values=ids, offsets=offsets, batch_size=batch_size)
    hotness = 1 if kind == "one id" else setting.hotness
    ids = torch.randint(setting.num_rows, (num_bags * hotness,))
    return dense, SparseFeatures(
        keys=keys, values=ids, hotness=(hotness,) * len(keys), batch_size=batch_size
    )


def _arrays(dense: Tensor, features: SparseFeatures) -> dict[str, object]:
    """The batch as the file takes it."""
    arrays: dict[str, object] = {"dense_features": dense.numpy()}
    lengths = features.lengths()
    for key, ids, of_key in zip(
        features.keys, features.values.split(lengths.sum(1).tolist()), lengths, strict=True
    ):
        if features.hotness is None:
            arrays |= {key: ids.numpy(), f"{key}.lengths": of_key.int().numpy()}
        else:
            arrays[key] = ids.view(features.batch_size, -1).numpy()
    return arrays


def _medians(calls: list[Callable[[], object]], num_turns: int) -> list[float]:
    """The median milliseconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(num_turns + 3):
        for call, of_call in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            of_call.append(1e3 * (time.perf_counter() - begin))
    # The first turns allocate.
    return [statistics.median(of_call[3:]) for of_call in times]


@torch.no_grad()
def measure(setting: Setting) -> None:
    """Print a line for each model, kind of bags and number of samples."""
    import onnxruntime

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    print(
        f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, 1 thread; "
        f"{setting.num_features} tables of dim {setting.dim}, {setting.num_rows} rows each, "
        f"{setting.hotness} ids in a bag"
    )
    print(f"{'milliseconds':<12} {'bags':<8} {'batch':>6} {'torch':>8} {'ONNX':>8}  torch / ONNX")
    for kind in setting.kinds:
        for name, model in _models(setting).items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "m.onnx"
                export_onnx(model, _batch(setting, 4, kind), path)
                session = onnxruntime.InferenceSession(
                    path, options, providers=["CPUExecutionProvider"]
                )
            for batch_size in setting.batch_sizes:
                batch = _batch(setting, batch_size, kind)
                arrays = _arrays(*batch)
                eager, onnx = _medians(
                    [lambda: model(*batch), lambda: session.run(None, arrays)],  # noqa: B023
                    setting.num_turns,
                )
                print(
                    f"{name:<12} {kind:<8} {batch_size:>6} {eager:>8.2f} {onnx:>8.2f}  "
                    f"{eager / onnx:.2f}"
                )


if __name__ == "__main__":
    given = tyro.cli(Setting)
    if given.parity:
        print_parity()
    else:
        measure(given)
