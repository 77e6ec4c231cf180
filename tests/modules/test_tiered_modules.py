"""What is done with modules, with tables on the device and with tables in host memory."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.support.stored_modules import NUM_IDS, StoredModules, batches, train_by_hand
from torchembed import EmbeddingCollection, EmbeddingConfig, HostMemory, SparseFeatures
from torchembed.optim import SGD, Adagrad, Adam, GradScaler, clip_grad_norm_

STORAGE = HostMemory(cache_rows=20)
"""Holds what a batch needs, and less than the rows of each table."""
Habit = Callable[[HostMemory | None], Any]


def trained(storage: HostMemory | None, kind: Any = Adam) -> StoredModules:
    """Modules whose cache holds rows that host memory does not."""
    model = StoredModules(storage)
    train_by_hand(model, batches(4), kind)
    return model


def steps(model: StoredModules, optimizer: Any, of: Iterable[Any]) -> list[float]:
    losses = []
    for batch in of:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def goes_on(model: StoredModules) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some more steps by a new optimizer, and the state after them."""
    return train_by_hand(model, batches(4, 4)), dict(model.state_dict())


def copies(storage: HostMemory | None) -> Any:
    model = trained(storage)
    made = copy.deepcopy(model)
    return goes_on(made), goes_on(model)


def pickles(storage: HostMemory | None) -> Any:
    return goes_on(pickle.loads(pickle.dumps(trained(storage))))


def saved_whole(storage: HostMemory | None) -> Any:
    memory = io.BytesIO()
    torch.save(trained(storage), memory)
    memory.seek(0)
    return goes_on(torch.load(memory, weights_only=False))


def made_without_memory(storage: HostMemory | None) -> Any:
    model = StoredModules(storage, device="meta").to_empty(device="cpu")
    nn.init.ones_(model.dense.weight)
    nn.init.zeros_(model.dense.bias)
    for module in model.tables:
        module.reset_parameters()
    return goes_on(model)


def cast(storage: HostMemory | None) -> Any:
    model = trained(storage)
    model.tables.to(torch.bfloat16)
    return goes_on(model)


def frozen_and_trained_again(storage: HostMemory | None) -> Any:
    model = StoredModules(storage)
    optimizer, losses = Adam.with_dense(model.parameters(), lr=0.05), []
    for number, requires_grad in enumerate((True, False, True)):
        model.tables.requires_grad_(requires_grad)
        losses += steps(model, optimizer, batches(3, 3 * number))
    return losses, dict(model.state_dict())


def assigned(storage: HostMemory | None) -> Any:
    model = trained(storage)
    halves = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(halves, assign=True)
    return goes_on(model)


def resumed_optimizer(storage: HostMemory | None) -> Any:
    model, other = StoredModules(storage), StoredModules(storage)
    optimizer, of_other = (Adam.with_dense(m.parameters(), lr=0.05) for m in (model, other))
    steps(model, optimizer, batches(4))
    steps(other, of_other, batches(2, 7))
    other.load_state_dict(model.state_dict())
    of_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = [steps(m, o, batches(4, 4)) for m, o in ((model, optimizer), (other, of_other))]
    assert found[0] == found[1]
    return found, of_other.state_dict()["state"]


def zeroed_by_the_module(storage: HostMemory | None) -> Any:
    model = StoredModules(storage)
    optimizer, losses = Adam.with_dense(model.parameters(), lr=0.05), []
    for number, batch in enumerate(batches(6)):
        loss = model(batch)
        loss.backward()
        if number % 2:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def scaled(storage: HostMemory | None) -> Any:
    """One loss is infinite, whose step is skipped."""
    model, scaler = StoredModules(storage), GradScaler("cpu", init_scale=256.0)
    optimizer = Adam.with_dense(model.parameters(), lr=0.05)
    for number, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.scale(model(batch) * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), dict(model.state_dict())


def other_optimizers(storage: HostMemory | None) -> Any:
    model = trained(storage)
    losses = [train_by_hand(model, batches(3, 4), kind) for kind in (Adagrad, SGD)]
    return losses, dict(model.state_dict())


def given_weights(storage: HostMemory | None) -> Any:
    model = trained(storage)
    given = {name: tensor.detach() * 0.5 for name, tensor in model.state_dict().items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    (batch,) = batches(1, 5)
    loss = torch.func.functional_call(model, leaves, (batch,))
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves.values()], goes_on(model)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized(storage: HostMemory | None) -> Any:
    model = trained(storage)
    parametrize.register_parametrization(model.tables[4], "weight", Half())
    with torch.no_grad():
        return [model(batch) for batch in batches(3)]


def reset(storage: HostMemory | None) -> Any:
    model = StoredModules(storage)
    optimizer = Adam.with_dense(model.parameters(), lr=0.05)
    losses = steps(model, optimizer, batches(3))
    for module in model.tables:
        module.reset_parameters()
    return losses, steps(model, optimizer, batches(3, 3)), dict(model.state_dict())


def compiled(storage: HostMemory | None) -> Any:
    model = trained(storage).eval()
    torch._dynamo.reset()
    program = torch.compile(model, fullgraph=True, backend="aot_eager") if storage else model
    with torch.no_grad():
        return [program(batch) for batch in batches(2, 3)]


def exported(storage: HostMemory | None) -> Any:
    """What was saved is of the time of the export."""
    model, (batch,) = trained(storage).eval(), batches(1, 3)
    with torch.no_grad():
        if storage is None:
            return model(batch)
        memory = io.BytesIO()
        torch.export.save(torch.export.export(model, (batch,)), memory)
        memory.seek(0)
        return torch.export.load(memory).module()(batch)


HABITS: list[Habit] = [
    copies,
    pickles,
    saved_whole,
    made_without_memory,
    cast,
    frozen_and_trained_again,
    assigned,
    resumed_optimizer,
    zeroed_by_the_module,
    scaled,
    other_optimizers,
    given_weights,
    parametrized,
    reset,
    compiled,
    exported,
]


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


# torch.export says that of every tensor that is not all of its storage.
@pytest.mark.filterwarnings("ignore:No complete tensor found in the group")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_modules_in_host_memory_do_as_on_the_device(habit: Habit) -> None:
    assert_equal(habit(None), habit(STORAGE))


def sequences(storage: HostMemory | None) -> EmbeddingCollection:
    """Two tables of one group, trained with clipped gradients."""
    torch.manual_seed(0)
    tables = EmbeddingCollection(
        [
            EmbeddingConfig(
                name=name,
                num_embeddings=NUM_IDS,
                embedding_dim=4,
                feature_names=(name,),
                storage=storage,
            )
            for name in ("a", "b")
        ]
    )
    optimizer = Adam(tables.parameters(), lr=0.05)
    for batch in batches(4):
        optimizer.zero_grad()
        found = tables(features_of(batch))
        torch.cat([vectors.values() for vectors in found.values()]).square().sum().backward()
        clip_grad_norm_(tables.parameters(), 0.1)
        optimizer.step()
    return tables.eval()


def features_of(batch: dict[str, Tensor]) -> SparseFeatures:
    values = torch.cat([batch["ids"].flatten(), batch["list"][:8]])
    return SparseFeatures(keys=("a", "b"), values=values, batch_size=4, hotness=(3, 2))


def test_a_compiled_collection_reads_rows_where_they_are() -> None:
    expected, model = sequences(None), sequences(STORAGE)
    program = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in batches(2, 3):
        found, wanted = (of(features_of(batch)) for of in (program, expected))
        for name, vectors in wanted.items():
            assert torch.equal(found[name].values(), vectors.values())


@pytest.mark.parametrize("is_training", [False, True])
def test_a_program_refuses_to_train_tables_in_host_memory(is_training: bool) -> None:
    model, (batch,) = trained(STORAGE).train(is_training), batches(1, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch._dynamo.reset()
    program = torch.compile(model.tables[4], fullgraph=True, backend="aot_eager")
    loss = program(batch["ids"]).sum()
    with pytest.raises(
        RuntimeError,
        match=r"tables in host memory must not be trained by a program of torch\.compile, which "
        "brings no rows to the device; compile the modules that take the vectors, without the",
    ):
        loss.backward()
    assert_equal(dict(model.state_dict()), before)


def test_refuses_dtypes_that_caches_do_not_hold() -> None:
    model = trained(STORAGE)
    before = {name: tensor.clone() for name, tensor in model.tables.state_dict().items()}
    with pytest.raises(
        TypeError,
        match="tables weight in host memory must be float32, float16 or bfloat16, got "
        r"torch\.float64 to convert them to",
    ):
        model.tables.double()
    assert_equal(dict(model.tables.state_dict()), before)


def test_refuses_transforms_that_would_train() -> None:
    model, (batch,) = trained(STORAGE), batches(1)
    with pytest.raises(RuntimeError, match=r"cannot record gradients inside a transform of torch"):
        torch.func.grad(lambda scale: (model.tables[4](batch["ids"]) * scale).sum())(torch.ones(4))
