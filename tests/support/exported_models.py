"""A model with every kind of lookup that graphs have, and its inputs as graphs take them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchembed
from torchembed import EmbeddingBagConfig, MixedFeatures, SparseFeatures
from torchembed.core.types import OnBadId

NUM_ROWS = 19
LAST_ROW = NUM_ROWS - 1


def _table(name: str, features: tuple[str, ...], dim: int, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=features, **more
    )


class Everything(nn.Module):
    """Fixed and jagged bags, sums and means, weights, several dims and dtypes, one table of two
    features, and two tasks."""

    def __init__(self, on_bad_id: OnBadId = OnBadId.RAISE) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = torchembed.EmbeddingBagCollection(
            tables=[
                _table("shared", ("fixed", "jagged"), 3),
                _table("means", ("mean",), 5, pooling="mean", dtype=torch.float16),
            ],
            on_bad_id=on_bad_id,
        )
        self.weighted = torchembed.EmbeddingBagCollection(
            tables=[_table("weighted", ("heavy",), 2, dtype=torch.bfloat16)],
            is_weighted=True,
            on_bad_id=on_bad_id,
        )
        self.hidden = nn.Linear(3 + 3 + 5 + 2 + 2, 4)
        self.click, self.buy = nn.Linear(4, 1), nn.Linear(4, 1, bias=False)

    def forward(
        self, dense: Tensor, features: MixedFeatures, heavy: SparseFeatures
    ) -> dict[str, Tensor]:
        found = self.bags(features)
        pooled = torch.cat([found[key].float() for key in ("fixed", "jagged", "mean")], 1)
        x = torch.cat([dense, pooled, self.weighted(heavy).values().float()], 1)
        x = self.hidden(x).tanh()
        return {"click": self.click(x)[:, 0], "buy": self.buy(x)}


def _lengths(batch_size: int) -> Tensor:
    """Of bags, the first of them empty, and the last where there are several."""
    lengths = torch.randint(0, 4, (batch_size,))
    lengths[:1] = lengths[1:][-1:] = 0
    return lengths


def arrays_of(batch_size: int, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """The inputs of the graph of :class:`Everything`; ids include the last row."""
    inputs = {"dense": torch.randn(batch_size, 2)}

    def add(name: str, size: tuple[int, ...], lengths: Tensor | None = None) -> None:
        ids = torch.randint(NUM_ROWS, size, dtype=dtype)
        ids[-1:] = LAST_ROW
        inputs[name] = ids
        if lengths is not None:
            inputs[f"{name}.lengths"] = lengths.int()

    add("fixed", (batch_size, 2))
    for name in ("jagged", "mean", "heavy"):
        lengths = _lengths(batch_size)
        add(name, (int(lengths.sum()),), lengths)
    inputs["heavy.weights"] = torch.rand(len(inputs["heavy"]))
    return inputs


def arguments_of(inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    """The arguments of the forward of :class:`Everything` for inputs of its graph."""
    batch_size = len(inputs["dense"])

    def jagged(keys: tuple[str, ...], weights: Tensor | None = None) -> SparseFeatures:
        lengths = torch.cat([inputs[f"{key}.lengths"] for key in keys]).long()
        return SparseFeatures(
            keys=keys,
            values=torch.cat([inputs[key] for key in keys]),
            offsets=nn.functional.pad(lengths.cumsum(0), (1, 0)),
            batch_size=batch_size,
            weights=weights,
        )

    fixed = SparseFeatures(
        keys=("fixed",), values=inputs["fixed"].flatten(), hotness=(2,), batch_size=batch_size
    )
    features = MixedFeatures((fixed, jagged(("jagged", "mean"))))
    return inputs["dense"], features, jagged(("heavy",), inputs["heavy.weights"])


def numpy_of(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Inputs as onnxruntime takes them."""
    return {name: tensor.numpy() for name, tensor in inputs.items()}


def forward_of(model: nn.Module, *arguments: Any) -> dict[str, Tensor]:
    """The outputs of a model in evaluation mode, by name."""
    model.eval()
    with torch.no_grad():
        found = model(*arguments)
    return found if isinstance(found, dict) else {"output": found}
