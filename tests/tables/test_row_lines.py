"""Rows and their optimizer states side by side in the memory of the host."""

import io

import pytest
import torch
from torch import Tensor

from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, HostMemory, SparseFeatures
from torchembed.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from torchembed.tables import Initializer, Normal, Uniform, padded_line_bytes
from torchembed.tables.tiers import HostGroup, host_group
from torchembed.tables.tiers.row_lines import row_lines

CPU = torch.device("cpu")
NUM_ROWS = 9


@pytest.mark.parametrize(
    ("row_bytes", "state_bytes", "expected"),
    [
        (512, 0, 512),
        (6, 0, 6),
        (260, 0, 260),
        (512, 4, 544),
        (512, 512, 1024),
        (256, 4, 272),
        (128, 4, 136),
        (64, 4, 68),
        (4, 4, 8),
        (2, 4, 8),
        (6, 4, 12),
        (6, 24, 32),
        (508, 4, 512),
    ],
)
def test_bytes_from_a_line_to_the_next(row_bytes: int, state_bytes: int, expected: int) -> None:
    assert padded_line_bytes(row_bytes, state_bytes) == expected


@pytest.mark.parametrize("dim", range(1, 300, 7))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_little_lies_between_lines(itemsize: int, dim: int) -> None:
    for state_bytes in (4, 4 * dim, 8 * dim):
        line_bytes = -(-dim * itemsize // 4) * 4 + state_bytes
        gap = padded_line_bytes(dim * itemsize, state_bytes) - line_bytes
        assert 0 <= gap < max(line_bytes / 16, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 65, 128])
def test_a_row_and_its_states_are_neighbours(dim: int, dtype: torch.dtype, device: str) -> None:
    weight = torch.empty(NUM_ROWS, dim, dtype=dtype, device="meta")
    shapes = [(NUM_ROWS, dim), (NUM_ROWS,)]
    found = row_lines(weight, shapes, torch.device(device))
    assert [(tuple(part.shape), part.dtype) for part in found] == [
        ((NUM_ROWS, dim), dtype),
        ((NUM_ROWS, dim), torch.float32),
        ((NUM_ROWS,), torch.float32),
    ]
    stride = padded_line_bytes(dim * dtype.itemsize, 4 * dim + 4)
    assert [part.stride(0) * part.itemsize for part in found] == [stride] * 3
    after_weight = -(-dim * dtype.itemsize // 4) * 4
    begins = [part.storage_offset() * part.itemsize for part in found]
    assert begins == [0, after_weight, after_weight + 4 * dim]
    assert len({part.untyped_storage()._cdata for part in found}) == 1
    if device == "meta":
        return
    for number, part in enumerate(found):
        part.fill_(number + 1)
    assert [part.unique().tolist() for part in found] == [[1], [2], [3]]


def test_rows_without_a_state_have_nothing_between_them() -> None:
    (weight,) = row_lines(torch.empty(NUM_ROWS, 65, device="meta"), [], CPU)
    assert weight.is_contiguous()


def tables(
    dim: int = 3, dtype: torch.dtype = torch.float32, initializer: Initializer | None = None
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=num_rows,
                embedding_dim=dim,
                feature_names=(name,),
                storage=HostMemory(cache_rows=4),
                dtype=dtype,
                initializer=initializer or Uniform(),
            )
            for name, num_rows in (("a", NUM_ROWS), ("b", 5))
        ]
    )


def group_of(module: EmbeddingBagCollection) -> HostGroup:
    (group,) = module.table_set.current_groups()
    assert isinstance(group, HostGroup)
    return group


def contents(module: EmbeddingBagCollection) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 3, 128])
@pytest.mark.parametrize("kind", [SGD, Adagrad, RowwiseAdagrad, Adam])
def test_an_optimizer_puts_rows_beside_their_states(
    kind: type[Adam], dim: int, dtype: torch.dtype
) -> None:
    module = tables(dim, dtype)
    before = contents(module)
    optimizer = kind(module.parameters(), lr=0.1)
    group = group_of(module)
    state_bytes = sum(4 * state.shape[1:].numel() for state in group.stored_states)
    stride = padded_line_bytes(dim * dtype.itemsize, state_bytes)
    for part in (group.stored_weight, *group.stored_states):
        assert part.stride(0) * part.itemsize == stride
    for parameter, rows in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, rows)
        for state in optimizer.state[parameter].values():
            assert not state.any()


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("initializer", [Uniform(), Normal()], ids=repr)
def test_large_weights_with_initial_rows_are_made_again(
    initializer: Initializer, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_group, "_MADE_AGAIN_BYTES", 1)
    monkeypatch.setattr(host_group, "_FILLED_ELEMENTS", 7)
    module = tables(initializer=initializer)
    kept = list(module.parameters())
    if is_changed:  # in a way that no version tells
        kept[1].data[4, 2] = 7.0
    before = contents(module)
    alias = kept[0].data
    Adagrad(module.parameters(), lr=0.1)
    for parameter, same, rows in zip(module.parameters(), kept, before, strict=True):
        assert parameter is same
        assert torch.equal(parameter, rows)
    assert torch.equal(alias, before[0])
    assert group_of(module).holds_parameters()


def test_weights_and_states_beside_each_other_are_saved_and_loaded() -> None:
    module, other = tables(), tables()
    optimizer, of_other = (RowwiseAdagrad(m.parameters(), lr=0.1) for m in (module, other))
    ids = SparseFeatures.from_dict({"a": [[1, 4]], "b": [[0]]})
    module(ids).values().sum().backward()
    optimizer.step()
    module.write_back()
    memory = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), memory)
    memory.seek(0)
    weights, states = torch.load(memory)
    other.load_state_dict(weights)
    of_other.load_state_dict(states)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        own, loaded = optimizer.state[one]["sum"], of_other.state[two]["sum"]
        assert own.any()
        assert torch.equal(own, loaded)
    with torch.no_grad():
        next(other.parameters()).copy_(torch.ones(NUM_ROWS, 3))
    assert torch.equal(group_of(other).stored_weight[:NUM_ROWS], torch.ones(NUM_ROWS, 3))
    assert torch.equal(of_other.state[next(other.parameters())]["sum"], states["state"][0]["sum"])
