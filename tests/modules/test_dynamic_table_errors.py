"""Errors of dynamic tables come before anything has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchembed import Dynamic, Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingBagConfig


def held(module: Embedding) -> list[int]:
    """The ids that have rows, ascending."""
    contents = module.table_set.tables[0].index_contents()
    return sorted(contents["ids"][contents["digests"] > 0].tolist())


def test_a_table_of_float64_gives_no_id_a_row_without_values() -> None:
    with pytest.raises(TypeError, match="dtype of a dynamic table must be float32"):
        Embedding(8, 4, dtype=torch.float64, dynamic=Dynamic())
    module = Embedding(8, 4, dynamic=Dynamic())
    row = module(torch.tensor([1]))
    module.double()
    assert torch.equal(module.eval()(torch.tensor([1])), row.double())
    with pytest.raises(TypeError, match="tables weight must be float32, float16 or bfloat16"):
        module.train()(torch.tensor([2]))
    assert held(module) == [1]
    module.float()(torch.tensor([2]))
    assert held(module) == [1, 2]


def test_ids_that_were_floating_are_not_loaded() -> None:
    module, other = (Embedding(8, 4, dynamic=Dynamic()) for _ in range(2))
    module(torch.tensor([2**53 + 1]))
    state = module.state_dict()
    state["index.ids"] = state["index.ids"].double()
    with pytest.raises(RuntimeError, match=r"index\.ids must be torch\.int64, got torch\.float64"):
        other.load_state_dict(state)
    assert held(other) == []


@pytest.mark.parametrize("field", ["num_embeddings", "embedding_dim"])
@pytest.mark.parametrize("value", [1.5, "8"])
def test_sizes_are_integers(field: str, value: object) -> None:
    settings: dict[str, Any] = {"num_embeddings": 8, "embedding_dim": 4, field: value}
    with pytest.raises(TypeError, match=f"{field} of table t must be an int, got {value!r}"):
        EmbeddingBagConfig(name="t", feature_names=("f",), **settings)


def test_a_clock_says_numbers() -> None:
    clock: Callable[[], Any] = lambda: None  # noqa: E731
    module = Embedding(8, 4, dynamic=Dynamic(ttl_seconds=1.0, clock=clock))
    with pytest.raises(TypeError, match="clock must return a number of seconds, got None"):
        module(torch.tensor([1]))
    assert held(module) == []


def test_weights_of_dynamic_tables_are_not_tied() -> None:
    a, b = (Embedding(8, 4, dynamic=Dynamic()) for _ in range(2))
    static = EmbeddingBag(8, 4, mode="sum")
    own = b.weight
    with pytest.raises(ValueError, match=r"dynamic tables .* cannot be tied; call one module"):
        b.weight = a.weight
    with pytest.raises(ValueError, match="weight of table weight must not be that of another"):
        static.weight = a.weight
    with pytest.raises(ValueError, match="cannot be tied"):
        b.weight = static.weight
    assert b.weight is own
    b.weight = own
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=8,
            embedding_dim=4,
            feature_names=(f"of_{name}",),
            dynamic=Dynamic(),
        )
        for name in "ab"
    ]
    holders = EmbeddingBagCollection(configs).embedding_bags
    with pytest.raises(ValueError, match=r"weight of table b .* got the one of table a: dynamic"):
        holders["b"].weight = holders["a"].weight
    linear = torch.nn.Linear(4, 8)
    linear.weight = a.weight
    assert linear.weight is a.weight
