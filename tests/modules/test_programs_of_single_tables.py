"""``EmbeddingBag`` and ``Embedding`` in programs of ``torch.compile`` and ``torch.export``."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import torchembed
from tests.support.tolerance import assert_same_bits
from tests.support.tracing import compiled_once
from tests.support.values import normal

NUM_ROWS, DIM = 11, 4
MODULES = {
    "bag": lambda device: torchembed.EmbeddingBag(NUM_ROWS, DIM, device=device, seed=1),
    "padded bag": lambda device: torchembed.EmbeddingBag(
        NUM_ROWS, DIM, padding_idx=3, on_bad_id="zero", device=device, seed=1
    ),
    "maximum": lambda device: torchembed.EmbeddingBag(
        NUM_ROWS, DIM, mode="max", on_bad_id="clamp", device=device, seed=1
    ),
    "embedding": lambda device: torchembed.Embedding(
        NUM_ROWS, DIM, padding_idx=3, device=device, seed=1
    ),
}
SIZES = ((34, 3), (26, 5))  # bags and ids in each


@pytest.fixture(autouse=True)
def no_compilations_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def bags(num_bags: int, num_ids: int, device: torch.device, *, jagged: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_bags)
    ids = torch.randint(NUM_ROWS, (num_bags, num_ids), generator=generator)
    if not jagged:
        return (ids.to(device),)
    offsets = torch.randint(ids.numel() + 1, (num_bags,), generator=generator).sort().values
    offsets[0] = 0
    return ids.flatten().to(device), offsets.to(device)


def assert_same_gradients(weight: Tensor, found: Tensor, expected: Tensor) -> None:
    gradient = normal(*found.shape, seed=2, device=found.device)
    of_weight = [torch.autograd.grad(out, weight, gradient)[0] for out in (found, expected)]
    assert_same_bits(*of_weight)


@pytest.mark.parametrize(
    ("kind", "jagged"),
    [
        ("bag", True),
        ("padded bag", False),
        ("padded bag", True),
        ("maximum", True),
        ("embedding", False),
    ],
)
def test_a_compiled_table_is_the_eager_one(kind: str, jagged: bool, device: torch.device) -> None:
    module = MODULES[kind](device)
    compiled, batch = compiled_once(module), bags(*SIZES[0], device, jagged=jagged)
    for num_bags, num_ids in SIZES:
        batch = bags(num_bags, num_ids, device, jagged=jagged)
        found, expected = compiled(*batch), module(*batch)
        assert_same_bits(found, expected)
        assert_same_gradients(module.weight, found, expected)
    with torch.no_grad():
        module.weight.data = normal(NUM_ROWS, DIM, seed=3, device=device)  # in other memory
    assert_same_bits(compiled(*batch), module(*batch))
    if kind in ("padded bag", "maximum"):
        batch[0].view(-1)[5] = NUM_ROWS
        assert_same_bits(compiled(*batch), module(*batch))


def test_weights_of_ids_get_gradients(device: torch.device) -> None:
    module = torchembed.EmbeddingBag(NUM_ROWS, DIM, mode="sum", device=device)
    ids, offsets = bags(*SIZES[0], device, jagged=True)
    weights = normal(ids.numel(), seed=4, device=device).requires_grad_()
    results = []
    for call in (compiled_once(module), module):
        out = call(ids, offsets, weights)
        results.append(torch.autograd.grad(out.square().sum(), (weights, module.weight)))
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", ["bag", "embedding"])
def test_a_program_raises_for_a_bad_id(kind: str, device: torch.device) -> None:
    module = MODULES[kind](device)
    compiled = compiled_once(module)
    (ids,) = bags(*SIZES[0], device, jagged=False)
    compiled(ids)
    ids[1, 2] = -1
    message = r"table weight, feature input, position 5 of the feature's ids, value -1"
    for program in (compiled, torch.export.export(module, (ids,)).module(), module):

        def call_and_wait(program: Callable[..., Tensor] = program) -> None:
            program(ids)
            module.check_ids()

        with pytest.raises(IndexError, match=message):
            call_and_wait()


def test_a_program_raises_for_offsets_that_mark_no_bags() -> None:
    module = MODULES["bag"](torch.device("cpu"))
    compiled = compiled_once(module)
    ids = torch.arange(5)
    compiled(ids, torch.tensor([0, 2, 3]))
    with pytest.raises(ValueError, match="offsets must not decrease, got 3 and 2"):
        compiled(ids, torch.tensor([0, 3, 2]))


@pytest.mark.parametrize(
    ("kind", "jagged", "strict"),
    [
        ("padded bag", False, True),
        ("bag", True, False),
        ("bag", True, True),
        ("embedding", False, False),
    ],
)
def test_an_exported_table_takes_other_sizes_and_weights(
    kind: str, jagged: bool, strict: bool, device: torch.device
) -> None:
    module = MODULES[kind](device)
    dims = torch.export.Dim("bags"), torch.export.Dim("ids")
    shapes = ({0: dims[1]}, {0: dims[0]}) if jagged else ({0: dims[0], 1: dims[1]},)
    batch = bags(*SIZES[0], device, jagged=jagged)
    file = io.BytesIO()
    torch.export.save(
        torch.export.export(module, batch, dynamic_shapes=shapes, strict=strict), file
    )
    program = torch.export.load(io.BytesIO(file.getvalue()))
    assert set(program.state_dict) == {"weight"} and not program.constants
    other = copy.deepcopy(module)
    other.load_state_dict({"weight": normal(NUM_ROWS, DIM, seed=3, device=device)})
    loaded = program.module()
    loaded.load_state_dict(other.state_dict())
    for sizes in (*SIZES, (1, 1)):
        batch = bags(*sizes, device, jagged=jagged)
        assert_same_bits(loaded(*batch), other(*batch))


@pytest.mark.parametrize("kind", list(MODULES))
def test_a_fused_optimizer_trains_a_compiled_table(kind: str, device: torch.device) -> None:
    weights = []
    for compiles in (False, True):
        module = MODULES[kind](device)
        optimizer = torchembed.optim.RowwiseAdagrad(module.parameters(), lr=0.1)
        call = compiled_once(module) if compiles else module
        for step in range(3):
            batch = bags(*SIZES[step % 2], device, jagged=kind == "bag")
            out = call(*batch)
            out.backward(normal(*out.shape, seed=step, device=device))
            optimizer.step()
            optimizer.zero_grad()
        assert module.weight.grad is None
        weights.append(module.weight.detach())
    assert_same_bits(*weights)


class LookedUpTwice(torch.nn.Module):
    """The sum of two lookups in one table."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = MODULES["embedding"](device)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.table(ids.flip(0))


def without_empty_sums(program: torch.fx.GraphModule, _: object) -> Callable[..., object]:
    """Leaves sums of tensors without elements out, with all that is computed for them alone, as
    Inductor does."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and node.meta["val"].numel() == 0:
            with program.graph.inserting_before(node):
                empty = program.graph.call_function(torch.ops.aten.empty, ([0],))
            node.replace_all_uses_with(empty)
    program.graph.eliminate_dead_code()
    program.recompile()
    return make_boxed_func(program.forward)


def test_each_lookup_of_a_program_trains_the_table(device: torch.device) -> None:
    backend = aot_autograd(fw_compiler=without_empty_sums)
    (ids,) = bags(*SIZES[0], device, jagged=False)
    weights = []
    for compiles in (False, True):
        model = LookedUpTwice(device)
        optimizer = torchembed.optim.SGD(model.parameters(), lr=1.0)
        call = torch.compile(model, fullgraph=True, backend=backend) if compiles else model
        out = call(ids)
        out.backward(torch.ones_like(out))
        optimizer.step()
        weights.append(model.table.weight.detach())
    assert_same_bits(*weights)


def test_a_compiled_table_that_was_moved_is_not_trained_in_vain(device: torch.device) -> None:
    module = MODULES["embedding"](device)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    compiled = compiled_once(module)
    (ids,) = bags(*SIZES[0], device, jagged=False)
    compiled(ids).sum().backward()
    optimizer.step()
    module.weight.data = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match="and have other memory"):
        compiled(ids).sum().backward()
