"""Parameters are views of their group's weight, whatever becomes of the module."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchembed
from tests.support.three_tables import assert_in_groups, features, make, train, weights
from tests.support.tolerance import assert_same_bits
from torchembed import EmbeddingBagCollection, EmbeddingBagConfig, HostMemory
from torchembed.tables import table_of


def test_parameters_are_views_of_one_weight(device: torch.device) -> None:
    module = make(device)
    (group,) = module._table_set.groups
    assert group.weight.shape == (12, 4)
    assert [p.data_ptr() - group.weight.data_ptr() for p in weights(module)] == [0, 48, 128]
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in weights(module))
    assert_in_groups(module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_to_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    module = make(device)
    before = [parameter.detach().clone() for parameter in weights(module)]
    parameters = weights(module)
    module.to(dtype)
    assert_in_groups(module)
    assert [id(parameter) for parameter in weights(module)] == list(map(id, parameters))
    for parameter, old in zip(parameters, before, strict=True):
        assert_same_bits(parameter, old.to(dtype))
    train(module)
    gradients = [parameter.grad for parameter in parameters]
    assert all(grad is not None and grad.dtype == dtype for grad in gradients)


def test_a_group_is_converted_as_a_whole(device: torch.device) -> None:
    # Table by table, all rows would be there twice.
    module = make(device)
    shapes = []

    def convert(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.half()

    module._apply(convert)
    assert shapes == [(12, 4), (0,)]  # the last, to see what becomes of the vectors' dtype
    assert_in_groups(module)


@pytest.mark.gpu
def test_to_a_gpu_and_back(device: torch.device) -> None:
    module = make("cpu")
    optimizer = torchembed.optim.Adagrad(module.parameters())
    train(module)
    module.to(device)  # the recorded gradients follow
    assert_in_groups(module)
    optimizer.step()
    module.cpu()
    assert_in_groups(module)
    on_cpu = make("cpu")
    optimizer = torchembed.optim.Adagrad(on_cpu.parameters())
    train(on_cpu)
    optimizer.step()
    for parameter, expected in zip(weights(module), weights(on_cpu), strict=True):
        assert_same_bits(parameter, expected)


def test_load_state_dict(device: torch.device) -> None:
    module, other = make(device), make(device, seed=1)
    addresses = [(id(parameter), parameter.data_ptr()) for parameter in weights(module)]
    module.load_state_dict(other.state_dict())
    assert [(id(parameter), parameter.data_ptr()) for parameter in weights(module)] == addresses
    assert_in_groups(module)
    for parameter, expected in zip(weights(module), weights(other), strict=True):
        assert_same_bits(parameter, expected)


def test_load_state_dict_with_assign(device: torch.device) -> None:
    module = make(device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    state = {name: value.clone() for name, value in make(device, seed=1).state_dict().items()}
    state["embedding_bags.b.weight"] = state["embedding_bags.b.weight"].half()
    module.load_state_dict(state, assign=True)
    assert_in_groups(module)
    dtypes = [parameter.dtype for parameter in weights(module)]
    assert dtypes == [torch.float32, torch.float16, torch.float32]
    for parameter, expected in zip(weights(module), state.values(), strict=True):
        assert_same_bits(parameter, expected)
    # The optimizer goes on with the same tables. As with torch, memory may be that of the state.
    before = [value.clone() for value in state.values()]
    train(module)
    optimizer.step()
    for parameter, old in zip(weights(module), before, strict=True):
        assert (old.float() - parameter.float()).round().sum(1)[:3].tolist() == [4, 0, 4]


def copied(module: EmbeddingBagCollection) -> EmbeddingBagCollection:
    return copy.deepcopy(module)


def pickled(module: EmbeddingBagCollection) -> EmbeddingBagCollection:
    return pickle.loads(pickle.dumps(module))


def saved(module: EmbeddingBagCollection) -> EmbeddingBagCollection:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copied, pickled, saved])
def test_copies_stand_alone(
    duplicate: Callable[[EmbeddingBagCollection], EmbeddingBagCollection], device: torch.device
) -> None:
    module = make(device)
    optimizer = torchembed.optim.Adam(module.parameters(), lr=1.0)
    train(module)
    optimizer.step()
    weights(module)[1].requires_grad_(False)
    train(module)  # recorded, and not applied: the copy has none of it
    before = [parameter.detach().clone() for parameter in weights(module)]

    twin = duplicate(module)
    assert_in_groups(twin)
    assert [p.requires_grad for p in weights(twin)] == [True, False, True]
    assert all(group.rule is None and not group.pending for group in twin._table_set.groups)
    train(twin)
    grads = [parameter.grad for parameter in weights(twin)]
    assert grads[1] is None
    assert grads[0] is not None and grads[0].sum(1).tolist() == [4, 0, 4]
    with torch.no_grad():
        weights(twin)[0].zero_()
    for parameter, expected in zip(weights(module), before, strict=True):
        assert_same_bits(parameter, expected)

    # The first one goes on, and the copy takes an optimizer of its own.
    optimizer.step()
    assert not torch.equal(weights(module)[0], before[0])
    other = torchembed.optim.SGD(twin.parameters(), lr=1.0)
    other.zero_grad()
    train(twin)
    other.step()
    assert weights(twin)[0].sum(1).tolist() == [-4, 0, -4]


def test_a_shallow_copy_shares_the_tables(device: torch.device) -> None:
    module = make(device)
    twin = copy.copy(module)
    assert weights(twin)[0] is weights(module)[0]
    assert_in_groups(twin)


def test_a_pickled_parameter_is_an_ordinary_one() -> None:
    parameter = pickle.loads(pickle.dumps(weights(make("cpu"))[1]))
    assert_same_bits(parameter, weights(make("cpu"))[1])
    assert table_of(parameter) is None


def test_a_saved_state_dict_is_plain(device: torch.device) -> None:
    module = make(device)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for name, expected in module.state_dict().items():
        assert_same_bits(state[name], expected)


def test_from_the_meta_device(device: torch.device) -> None:
    module = make("meta")
    assert all(parameter.is_meta for parameter in weights(module))
    module.reset_parameters()  # nothing to do
    module.to_empty(device=device)
    module.reset_parameters()
    assert_in_groups(module)
    for parameter, expected in zip(weights(module), weights(make(device)), strict=True):
        assert_same_bits(parameter, expected)


def test_an_optimizer_made_on_the_meta_device(device: torch.device) -> None:
    module, expected = make("meta"), make(device)
    optimizers = [
        torchembed.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5)
        for m in (module, expected)
    ]
    module.to_empty(device=device)
    module.reset_parameters()
    for trained, optimizer in zip((module, expected), optimizers, strict=True):
        train(trained)
        optimizer.step()
    for parameter, other in zip(weights(module), weights(expected), strict=True):
        assert_same_bits(parameter, other)


def test_reset_parameters_restores_the_initial_rows(device: torch.device) -> None:
    module = make(device)
    with torch.no_grad():
        for parameter in weights(module):
            parameter.zero_()
    module.reset_parameters()
    for parameter, expected in zip(weights(module), weights(make(device)), strict=True):
        assert_same_bits(parameter, expected)


def test_parameters_may_be_replaced(device: torch.device) -> None:
    module = make(device)
    module.embedding_bags["b"].weight = nn.Parameter(torch.ones(5, 4, device=device))
    assert_in_groups(module)
    weights(module)[2].data = torch.full((4, 4), 2.0, device=device)
    assert_in_groups(module)
    assert module(features(device))["b"].unique().tolist() == [1.0]
    assert module(features(device))["c"].unique().tolist() == [2.0]


def test_a_replaced_weight_is_converted(device: torch.device) -> None:
    module = make(device)
    weights(module)[2].data = torch.full((4, 4), 2.0, device=device)
    module.half()
    assert_in_groups(module)
    assert_same_bits(weights(module)[2], torch.full((4, 4), 2.0, dtype=torch.float16))


def test_a_group_that_is_left_is_freed(device: torch.device) -> None:
    # No table keeps the rows of its former group in memory.
    module = make(device)
    (left,) = (group.weight for group in module._table_set.groups)
    torchembed.optim.SGD([{"params": parameter} for parameter in module.parameters()], lr=1.0)
    for group in module._table_set.groups:
        assert group.weight.untyped_storage().nbytes() == group.weight.nbytes
        offset = group.weight.data_ptr() - left.data_ptr()
        assert not 0 <= offset < left.nbytes
    assert len(module._table_set.groups) == 3


def test_memory_may_be_shared() -> None:
    module = make("cpu")
    module.share_memory()
    assert all(parameter.is_shared() for parameter in weights(module))
    assert_in_groups(module)


def test_zero_grad_clears_what_torch_would(device: torch.device) -> None:
    module = make(device)
    train(module)
    module.zero_grad()
    assert all(parameter.grad is None for parameter in weights(module))


def test_tables_in_host_memory_share_a_cache_of_all_their_rows(device: torch.device) -> None:
    storages = {"a": HostMemory(cache_rows=3), "b": HostMemory(cache_rows=5), "c": None}
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=6,
            embedding_dim=4,
            feature_names=(name,),
            storage=storage,
        )
        for name, storage in storages.items()
    ]
    module = EmbeddingBagCollection(configs, device=device)
    torchembed.optim.Adagrad(module.parameters())
    in_host, on_device = module._table_set.current_groups()
    assert [table.spec.name for table in in_host.tables] == ["a", "b"]
    assert [table.spec.name for table in on_device.tables] == ["c"]
    (statistics,) = module.cache_statistics(wait=True).values()
    assert statistics.capacity == 8
