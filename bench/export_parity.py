"""Answers of onnxruntime, from files of ``export_onnx``, compared with those of eager PyTorch, for
each of the library's models, and for other numbers of samples than were traced.

``python -m bench.export --parity`` prints the comparison.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchembed
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures, models
from torchembed.export import export_onnx

TOLERANCE = 1e-5
"""Largest difference of an output, in parts of the largest output, or of 1 where that is more."""
_TRACED = 32
"""Samples of the examples that a graph is traced with."""
SIZES = (0, 1, _TRACED, 10 * _TRACED)
_KEYS = tuple(f"f{n}" for n in range(6))
_NUM_ROWS, _DIM, _NUM_DENSE, _HOTNESS, _MAX_LENGTH, _NUM_CANDIDATES = 1000, 16, 13, 3, 50, 4
_LOOPS = {"Loop", "If", "Scan"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and its batches."""

    model: nn.Module
    batch: Callable[[int], Any]
    """Arguments of ``forward`` for a number of samples."""
    arrays: Callable[[Any], dict[str, np.ndarray]]
    """The batch as the graph takes it."""


@dataclasses.dataclass(frozen=True)
class Parity:
    """How a graph answers, beside its model."""

    differences: tuple[float, ...]
    """The largest of all outputs, for each of :data:`SIZES`; NaN where names or shapes differ."""
    largest: float
    """The largest absolute output of PyTorch."""
    loops: tuple[str, ...]
    """Operators of the graph that run a graph of their own."""

    @property
    def is_kept(self) -> bool:
        """True where the graph has no loop, and no difference exceeds :data:`TOLERANCE`."""
        most = TOLERANCE * max(1.0, self.largest)
        return not self.loops and all(difference <= most for difference in self.differences)


def _bags(dim: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=key, num_embeddings=_NUM_ROWS, embedding_dim=dim, feature_names=(key,)
            )
            for key in _KEYS
        ]
    )


def click_models() -> dict[str, nn.Module]:
    """The models of clicks and of several tasks, which take dense and sparse features."""
    deep: dict[str, Any] = {"layer_sizes": [64, 32], "dense_in_features": _NUM_DENSE}
    tasks: dict[str, Any] = {
        "task_names": ("click", "buy"),
        "tower_layer_sizes": [16],
        "dense_in_features": _NUM_DENSE,
    }
    bottom, over = [64, _DIM], [64, 1]
    linear: dict[str, Any] = {"dense_in_features": _NUM_DENSE}
    return {
        "LogisticRegression": models.LogisticRegression(_bags(1), **linear),
        "FactorizationMachine": models.FactorizationMachine(_bags(_DIM), _bags(1), **linear),
        "DNN": models.DNN(_bags(_DIM), **deep),
        "WideAndDeep": models.WideAndDeep(_bags(_DIM), _bags(1), **deep),
        "DeepFM": models.DeepFM(_bags(_DIM), _bags(1), **deep),
        "DCN": models.DCN(_bags(_DIM), num_cross_layers=3, **deep),
        "DCNv2": models.DCNv2(_bags(_DIM), num_cross_layers=3, **deep),
        "DLRM": models.DLRM(_bags(_DIM), _NUM_DENSE, bottom, over),
        "DLRM-DCNv2": models.DLRM_DCNv2(_bags(_DIM), _NUM_DENSE, bottom, over, 3, 16),
        "xDeepFM": models.XDeepFM(_bags(_DIM), _bags(1), cin_layer_sizes=[16, 16], **deep),
        "AutoInt": models.AutoInt(
            _bags(_DIM), num_attention_layers=2, attention_dim=16, num_heads=2, **deep
        ),
        "SharedBottom": models.SharedBottom(_bags(_DIM), bottom_layer_sizes=[32], **tasks),
        "MMoE": models.MMoE(_bags(_DIM), num_experts=4, expert_layer_sizes=[32], **tasks),
        "PLE": models.PLE(
            _bags(_DIM),
            num_levels=2,
            num_task_experts=2,
            num_shared_experts=2,
            expert_layer_sizes=[32],
            **tasks,
        ),
    }


def history_models() -> dict[str, nn.Module]:
    """The models of packed histories, as they are exported."""

    def items() -> torchembed.Embedding:
        return torchembed.Embedding(_NUM_ROWS, _DIM)

    sizes: dict[str, Any] = {"embedding_dim": _DIM, "max_length": _MAX_LENGTH}
    encoders = {
        "SASRec": models.SASRec(items(), num_heads=2, **sizes),
        "HSTU": models.HSTU(items(), num_heads=2, **sizes),
    }
    next_items = {n: models.NextItem(e, num_items=_NUM_ROWS) for n, e in encoders.items()}
    return {
        "DIN": models.DIN(items(), **sizes),
        "TwoTower": models.CandidateScores(models.TwoTower(items(), **sizes)),
        **{name: models.CandidateScores(model) for name, model in next_items.items()},
    }


def _lengths(count: int, most: int) -> Tensor:
    """Lengths of bags, of which every third is empty, the first and the last too."""
    lengths = torch.randint(1, most + 1, (count,))
    lengths[::3] = 0
    lengths[-1:] = 0
    return lengths


def _click_batch(batch_size: int, kind: str) -> tuple[Tensor, SparseFeatures]:
    dense, num_bags = torch.randn(batch_size, _NUM_DENSE), batch_size * len(_KEYS)
    if kind == "fixed":
        ids = torch.randint(_NUM_ROWS, (num_bags * _HOTNESS,))
        hotness = (_HOTNESS,) * len(_KEYS)
        return dense, SparseFeatures(keys=_KEYS, values=ids, hotness=hotness, batch_size=batch_size)
    offsets = nn.functional.pad(_lengths(num_bags, 2 * _HOTNESS).cumsum(0), (1, 0))
    ids = torch.randint(_NUM_ROWS, (int(offsets[-1]),))
    return dense, SparseFeatures(keys=_KEYS, values=ids, offsets=offsets, batch_size=batch_size)


def click_arrays(batch: tuple[Tensor, SparseFeatures]) -> dict[str, np.ndarray]:
    """Dense and sparse features as graphs take them."""
    dense, features = batch
    arrays = {"dense_features": dense.numpy()}
    lengths = features.lengths()
    of_keys = features.values.split(lengths.sum(1).tolist())
    for key, ids, of_key in zip(features.keys, of_keys, lengths, strict=True):
        if features.hotness is None:
            arrays |= {key: ids.numpy(), f"{key}.lengths": of_key.int().numpy()}
        else:
            arrays[key] = ids.view(features.batch_size, _HOTNESS).numpy()
    return arrays


def _impressions(batch_size: int) -> models.Impressions:
    offsets = nn.functional.pad(_lengths(batch_size, _MAX_LENGTH).cumsum(0), (1, 0))
    candidates = torch.randint(_NUM_ROWS, (batch_size, _NUM_CANDIDATES))
    return models.Impressions(torch.randint(_NUM_ROWS, (int(offsets[-1]),)), offsets, candidates)


def _history_arrays(impressions: models.Impressions) -> dict[str, np.ndarray]:
    return {
        "items": impressions.items.numpy(),
        "items.lengths": impressions.offsets.diff().int().numpy(),
        "candidates": impressions.candidates.numpy(),
    }


def cases() -> dict[tuple[str, str], Case]:
    """All models, by their names and the kind of their bags, ``fixed`` or ``jagged``."""
    found = {
        (name, kind): Case(model, lambda n, kind=kind: _click_batch(n, kind), click_arrays)
        for name, model in click_models().items()
        for kind in ("fixed", "jagged")
    }
    for name, model in history_models().items():
        found[name, "jagged"] = Case(model, _impressions, _history_arrays)
    return found


@torch.no_grad()
def compare(case: Case) -> Parity:
    """Export a model, whose weights of tables become random, and compare the answers."""
    import onnx
    import onnxruntime

    for module in case.model.eval().modules():
        if isinstance(module, EmbeddingBagCollection | torchembed.Embedding):
            for weight in module.parameters():
                # Else outputs are about 0, and differences too small to be seen.
                weight.uniform_(-1, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        export_onnx(case.model, case.batch(_TRACED), path)
        nodes = onnx.load(path).graph.node
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    differences, largest = [], 0.0
    for size in SIZES:
        batch = case.batch(size)
        arguments = (batch,) if isinstance(batch, models.Impressions) else batch
        expected = case.model(*arguments)
        if not isinstance(expected, Mapping):
            expected = {names[0]: expected}
        answers: Any = session.run(names, case.arrays(batch))
        found = dict(zip(names, answers, strict=True))
        differences.append(_difference(found, expected))
        largest = max(largest, *(_most(np.abs(t.numpy())) for t in expected.values()))
    loops = tuple(sorted(_LOOPS.intersection(node.op_type for node in nodes)))
    return Parity(tuple(differences), largest, loops)


def _difference(found: Mapping[str, np.ndarray], expected: Mapping[str, Tensor]) -> float:
    if {n: a.shape for n, a in found.items()} != {n: tuple(t.shape) for n, t in expected.items()}:
        return float("nan")
    return max(_most(np.abs(found[name] - tensor.numpy())) for name, tensor in expected.items())


def _most(numbers: np.ndarray) -> float:
    """The largest of ``numbers``; 0 where there is none, and NaN where one is NaN."""
    return float(numbers.max(initial=0.0))


def print_parity() -> None:
    """Print a line for each model and kind of bags.

    Raises:
        SystemExit: after the last line, where a graph has a loop or answers otherwise.
    """
    import onnxruntime

    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}; largest differences of "
        f"the answers for {', '.join(map(str, SIZES))} samples, traced with {_TRACED}"
    )
    sizes = " ".join(f"{size:>8}" for size in SIZES)
    print(f"{'model':<20} {'bags':<7} {sizes} {'largest output':>14}  loops")
    failed = []
    for (name, kind), case in cases().items():
        parity = compare(case)
        differences = " ".join(f"{difference:>8.1e}" for difference in parity.differences)
        loops = ", ".join(parity.loops) or "none"
        print(f"{name:<20} {kind:<7} {differences} {parity.largest:>14.2f}  {loops}", flush=True)
        if not parity.is_kept:
            failed.append(f"{name}, {kind}")
    if failed:
        raise SystemExit(f"graphs have loops, or answer otherwise than PyTorch: {failed}")
