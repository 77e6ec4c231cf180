"""Models of packed histories of any lengths, as ONNX files and as deployed programs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.exported_models import forward_of
from tests.support.served_lookups import options_over
from torchembed.export import DeployError, export_onnx
from torchembed.models import (
    DIN,
    HSTU,
    CandidateScores,
    Histories,
    Impressions,
    NextItem,
    SASRec,
    TwoTower,
)
from torchembed.serving.models import ModelRepository, deploy
from torchembed.stores import MemoryStore

NUM_ITEMS, MAX_LENGTH, TRACED_LENGTH, NUM_CANDIDATES = 31, 24, 3, 3
SIZES: dict[str, Any] = {"embedding_dim": 4, "max_length": MAX_LENGTH}


def _items() -> torchembed.Embedding:
    return torchembed.Embedding(NUM_ITEMS, 4)


class _Models(nn.Module):
    """All models of histories over the same impressions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        blocks = {"num_blocks": 1, "num_heads": 2}
        self.din = DIN(_items(), **SIZES, attention_sizes=(6,), layer_sizes=(6,))
        self.others = nn.ModuleDict(
            {
                "two_tower": CandidateScores(TwoTower(_items(), **SIZES, layer_sizes=(6, 5))),
                "sasrec": CandidateScores(
                    NextItem(SASRec(_items(), **SIZES, **blocks), num_items=NUM_ITEMS)
                ),
                "hstu": CandidateScores(
                    NextItem(HSTU(_items(), **SIZES, **blocks), num_items=NUM_ITEMS)
                ),
            }
        )

    def forward(self, impressions: Impressions) -> dict[str, Tensor]:
        found = {"din": self.din(impressions)}
        for name, model in self.others.items():
            found |= {f"{name}.{output}": t for output, t in model(impressions).items()}
        return found


def impressions_of(lengths: list[int], *, num_spare: int = 0) -> Impressions:
    """Users with histories of ``lengths``, and items behind them that count for nothing."""
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)])
    items = torch.randint(NUM_ITEMS, (int(offsets[-1]) + num_spare,))
    return Impressions(items, offsets, torch.randint(NUM_ITEMS, (len(lengths), NUM_CANDIDATES)))


def arrays_of(impressions: Impressions) -> dict[str, np.ndarray]:
    """Impressions as graphs and servers take them."""
    return {
        "items": impressions.items.numpy(),
        "items.lengths": impressions.offsets.diff().int().numpy(),
        "candidates": impressions.candidates.numpy(),
    }


TRACED = [TRACED_LENGTH, 0, 1, TRACED_LENGTH]
LENGTHS = {
    "no user": [],
    "no item": [0, 0, 0],
    "one item": [1],
    "one item each": [1, 1, 1, 1, 1],
    "as traced": TRACED,
    "10 times as traced, cut": [10 * n for n in TRACED],
    "many users": [n % (MAX_LENGTH + 3) for n in range(40)],
}


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=0, atol=1e-5)


def test_onnxruntime_answers_as_torch_for_any_lengths(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs torchembed[export]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs torchembed[export]")
    pytest.importorskip("onnxscript", reason="needs torchembed[export]")
    model, path = _Models(), tmp_path / "m.onnx"
    export_onnx(model, impressions_of(TRACED, num_spare=2), path)
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert kinds.isdisjoint({"Loop", "If", "Scan"})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for lengths in LENGTHS.values():
        impressions = impressions_of(lengths)
        answers = session.run(names, arrays_of(impressions))
        found = {n: torch.from_numpy(a) for n, a in zip(names, answers, strict=True)}
        check_close(found, forward_of(model, impressions))
    inputs = arrays_of(impressions_of(TRACED))
    inputs["items"][3] = NUM_ITEMS
    with pytest.raises(Exception, match="indices element out of data bounds"):
        session.run(names, inputs)


def test_servers_answer_as_torch_for_any_lengths(tmp_path: Path) -> None:
    model = _Models()
    examples = impressions_of(TRACED, num_spare=2)
    deploy(model, tmp_path, name="m", version=1, examples=examples)
    with ModelRepository(tmp_path, options_over(MemoryStore())) as repository:
        repository.load("m")
        for what, lengths in LENGTHS.items():
            if what == "no user":
                continue  # requests have one at least
            impressions = impressions_of(lengths)
            outputs = dict(repository.model("m").answer(arrays_of(impressions)).outputs)
            del outputs["default_rows"]
            found = {name: torch.from_numpy(array) for name, array in outputs.items()}
            check_close(found, forward_of(model, impressions))


class _MeanItem(nn.Module):
    """Masks by ids, and reads a number of the batch."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.items, self.reads = _items(), reads

    def forward(self, impressions: Impressions) -> Tensor:
        vectors = self.items(impressions.items)
        vectors = vectors.masked_fill((impressions.items == 0).unsqueeze(1), 0.0)
        padded = impressions.layout(MAX_LENGTH).pad(vectors)
        if self.reads:
            padded = padded * float(padded.sum() > 0)
        return padded.sum((1, 2))


def test_programs_may_read_packed_ids(tmp_path: Path) -> None:
    model = _MeanItem(reads=False)
    deploy(model, tmp_path, name="m", version=1, examples=impressions_of(TRACED))
    with ModelRepository(tmp_path, options_over(MemoryStore())) as repository:
        repository.load("m")
        for lengths in ([0, 0], [4, 0, 9]):
            impressions = impressions_of(lengths)
            impressions.items[:1] = 0
            given = arrays_of(impressions)
            del given["candidates"]
            outputs = repository.model("m").answer(given).outputs
            (expected,) = forward_of(model, impressions).values()
            np.testing.assert_allclose(outputs["output"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "examples", "message"),
    [
        (
            _MeanItem(reads=True),
            impressions_of(TRACED),
            r"is not, at .*test_sequence_models\.py, line \d+: padded = padded \* float\(",
        ),
        (
            NextItem(SASRec(_items(), **SIZES), num_items=NUM_ITEMS),
            impressions_of(TRACED).histories(),
            "ids of encoder.items must be an argument of the model.* computed in its forward",
        ),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(
    model: nn.Module, examples: Histories | Impressions, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DeployError, match=message):
        deploy(model, tmp_path, name="m", version=1, examples=examples)
