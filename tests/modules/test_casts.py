"""The dtype of vectors after the module is cast."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchembed
from tests.support.ranks import run_on_ranks
from tests.support.three_tables import NAMES, TABLES, features, make
from torchembed import EmbeddingCollection, EmbeddingConfig

CASTS: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float16: nn.Module.half,
    torch.bfloat16: nn.Module.bfloat16,
    torch.float64: nn.Module.double,
    torch.float32: nn.Module.float,
}


class Model(nn.Module):
    """Two kinds of collections, and a layer over their vectors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.pooled = make(device)
        tables = [
            EmbeddingConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=(name,))
            for name in NAMES
        ]
        self.sequences = EmbeddingCollection(tables, device=device)
        self.over = nn.Linear(12, 1, device=device)

    def forward(self, device: torch.device) -> torch.Tensor:
        batch = features(device)
        found = self.sequences(batch)
        vectors = torch.cat([found[name].values() for name in NAMES], dim=1)
        return self.over(self.pooled(batch).values() + vectors)


@pytest.mark.parametrize("dtype", CASTS)
def test_vectors_are_cast_with_the_module(dtype: torch.dtype, device: torch.device) -> None:
    for cast in (CASTS[dtype], lambda module: module.to(dtype)):
        model = Model(device)
        cast(model)
        result = model(device)
        assert result.dtype == dtype
        result.sum().backward()
        assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
        assert model.to(device).float()(device).dtype == torch.float32


def test_vectors_stay_as_they_were_asked_for(device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        module = torchembed.EmbeddingBagCollection(TABLES, device=device, output_dtype=dtype)
        module.bfloat16()
        assert module(features(device)).values().dtype == dtype


def test_tables_of_16_bits_give_float32(device: torch.device) -> None:
    # As TorchRec's: less memory for rows need not mean less precision of vectors.
    module = make(device, torch.float16)
    assert module(features(device)).values().dtype == torch.float32
    assert module.to(device)(features(device)).values().dtype == torch.float32


def test_a_refused_dtype_of_vectors() -> None:
    with pytest.raises(TypeError, match="output_dtype must be float32, float16 or bfloat16, got"):
        torchembed.EmbeddingBagCollection(TABLES, output_dtype=torch.int64)


def _cast_after_sharding() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"pooled.embedding_bags.{name}": "row_wise" for name in NAMES}
    plan["pooled.embedding_bags.a"] = plan["sequences.embeddings.a"] = "data_parallel"
    plan |= {f"sequences.embeddings.{name}": "table_wise" for name in NAMES[1:]}
    model = torchembed.shard_embeddings(Model(torch.device("cpu")), mesh, plan).bfloat16()
    result = model(torch.device("cpu"))
    result.sum().backward()
    return [str(result.dtype), *{str(p.grad.dtype) for p in model.parameters()}]


def test_a_sharded_model_casts_its_vectors() -> None:
    assert run_on_ranks(2, _cast_after_sharding) == [["torch.bfloat16"] * 2] * 2
