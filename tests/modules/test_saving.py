"""Files that other libraries write of models whose parameters lie side by side in one memory."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.tolerance import assert_same_bits
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig
from torchembed.autograd.gradient_slots import slot_of
from torchembed.core.own_storage import with_own_storage
from torchembed.tables import table_of


class Model(nn.Module):
    """Three tables of one group, and two dense layers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=4, feature_names=(name,)
            )
            for name, rows in (("a", 3), ("b", 5), ("c", 7))
        ]
        self.tables = EmbeddingBagCollection(tables, device=device)
        self.first = nn.Linear(12, 3, device=device)
        self.second = nn.Linear(3, 3, device=device)


def trained_model(device: torch.device) -> Model:
    """A model whose tables and dense parameters have fused optimizers."""
    model = Model(device)
    torchembed.optim.Adagrad(model.tables.parameters())
    torchembed.optim.DenseAdagrad([*model.first.parameters(), *model.second.parameters()])
    return model


def storages(tensors: dict[str, Tensor]) -> set[tuple[int, int]]:
    """Address and size of each tensor's storage, by which others find tensors that are one."""
    found = [tensor.untyped_storage() for tensor in tensors.values()]
    return {(storage.data_ptr(), storage.nbytes()) for storage in found}


def test_no_two_entries_of_a_state_dict_share_a_storage(device: torch.device) -> None:
    state = trained_model(device).state_dict()
    assert len(state) == 7
    expected = {(entry.data_ptr(), entry.nbytes) for entry in state.values()}
    assert storages(state) == expected
    assert len(expected) == 7


def test_a_state_dict_is_the_model_itself(device: torch.device) -> None:
    model = trained_model(device)
    with torch.no_grad():
        for entry in model.state_dict().values():
            entry.fill_(3.0)
    for parameter in model.parameters():
        assert_same_bits(parameter.detach(), torch.full_like(parameter, 3.0))
    (group,) = model.tables._table_set.current_groups()
    assert_same_bits(group.weight, torch.full_like(group.weight, 3.0))


def read_again(saved: object) -> Any:
    """The object that ``torch.load`` makes of it by default, which runs no code of the file."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


def test_one_tensor_alone_can_be_saved(device: torch.device) -> None:
    model = Model(device)
    optimizers = [
        torchembed.optim.Adam(model.tables.parameters()),
        torchembed.optim.DenseAdam([*model.first.parameters(), *model.second.parameters()]),
    ]
    for optimizer in optimizers:
        for parameter, entry in optimizer.state.items():
            for tensor in (parameter, *entry.values()):
                found = read_again(tensor)
                assert_same_bits(found, tensor)
                assert found.untyped_storage().nbytes() == tensor.nbytes
                assert table_of(found) is None
                assert slot_of(found) is None
    for part in (model.tables.embedding_bags["b"], model.second):
        for name, found in read_again(part.state_dict()).items():
            assert_same_bits(found, part.state_dict()[name])
            assert found.untyped_storage().nbytes() == found.nbytes


def test_a_saved_model_finds_its_tables_again(device: torch.device) -> None:
    model = trained_model(device)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert [table_of(p) is None for p in found.parameters()] == [False] * 3 + [True] * 4
    for one, other in zip(found.parameters(), model.parameters(), strict=True):
        assert_same_bits(one, other)


def test_safetensors_writes_every_tensor(device: torch.device, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model, path = trained_model(device), tmp_path / "model.safetensors"
    for save in (
        safetensors.save_model,
        lambda m, file: safetensors.save_file(m.state_dict(), file),
    ):
        save(model, str(path))
        loaded = safetensors.load_file(str(path))
        assert set(loaded) == set(model.state_dict())
        for name, entry in model.state_dict().items():
            assert_same_bits(loaded[name], entry)


def test_a_part_keeps_its_whole_alive() -> None:
    whole = torch.arange(12.0)
    part = with_own_storage(whole[4:8])
    assert part.data_ptr() == whole[4:].data_ptr()
    del whole
    torch.full((12,), -1.0)  # would take the memory, were it free
    assert part.tolist() == [4.0, 5.0, 6.0, 7.0]
    part += 1
    assert part.tolist() == [5.0, 6.0, 7.0, 8.0]


def test_what_has_its_storage_stays_as_it_is() -> None:
    whole = torch.arange(6.0)
    assert with_own_storage(whole) is whole
    empty, meta = whole[2:2], torch.empty(4, device="meta")[1:]
    assert with_own_storage(empty) is empty
    assert with_own_storage(meta) is meta
    shared = torch.zeros(6).share_memory_()[2:]
    assert with_own_storage(shared) is shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_stay(dtype: torch.dtype, device: torch.device) -> None:
    whole = torch.arange(8.0, device=device).to(dtype)
    assert_same_bits(with_own_storage(whole[2:5]), whole[2:5])
