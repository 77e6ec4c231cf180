"""Lookups without a fused optimizer have derivatives of every order, by autograd and torch.func."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

import torchembed
from tests.support.values import whole
from torchembed import EmbeddingBagConfig, EmbeddingConfig, SparseFeatures

# Products and sums of small whole numbers, and halves and quarters of them, are exact in any order.
ROWS, DIM = (5, 6), 3
IDS = [0, 3, 3, 2, 4, 0, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A module and what it gives, by ``index_select``.

    Attributes:
        make: of a device.
        arguments: of a call, given weights of ids or None.
        of: for each bag, or for each id where nothing is pooled, the table of its ids, and their
            positions in ``IDS``; in the order of the result's rows.
        pooling: None where each id has a vector of its own.
        weighted: whether ids have weights.
    """

    make: Callable[[torch.device], nn.Module]
    arguments: Callable[[Tensor | None], tuple[object, ...]]
    of: Sequence[tuple[int, Sequence[int]]]
    pooling: str | None = "sum"
    weighted: bool = False

    def plain(self, tables: Sequence[Tensor], factors: Tensor | None) -> Tensor:
        """The module's vectors for ``tables``."""
        ids, found = torch.tensor(IDS, device=tables[0].device), []
        for table, positions in self.of:
            places = torch.tensor(positions, dtype=torch.int64, device=ids.device)
            vectors = tables[table].index_select(0, ids[places])
            if factors is not None:
                vectors = vectors * factors[places].unsqueeze(1)
            if self.pooling == "max":
                found.append(vectors.amax(0))
            else:
                count = len(positions) if self.pooling == "mean" and positions else 1
                found.append(vectors.sum(0) / count)
        return torch.stack(found).flatten()


def tensors_of(result: object) -> Tensor:
    """The vectors of a module's result, one after the other."""
    if isinstance(result, Tensor):
        return result.flatten()
    if isinstance(result, dict):
        return torch.cat([part.values().flatten() for part in result.values()])
    return result.values().flatten()  # type: ignore[attr-defined]


def configs(kind: type[EmbeddingConfig]) -> list[EmbeddingConfig]:
    return [
        kind(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=(feature,))
        for name, rows, feature in zip("ab", ROWS, ("x", "y"), strict=True)
    ]


def bags_of_collection(device: torch.device, *, is_weighted: bool = False) -> nn.Module:
    tables = configs(EmbeddingBagConfig)
    return torchembed.EmbeddingBagCollection(tables, is_weighted=is_weighted, device=device)


def ids_of_collection(device: torch.device) -> nn.Module:
    return torchembed.EmbeddingCollection(configs(EmbeddingConfig), device=device)


def features(factors: Tensor | None, *, jagged: bool) -> tuple[SparseFeatures]:
    """``y`` before ``x``, so that features change places."""
    ids = torch.tensor(IDS)
    if jagged:
        offsets = torch.tensor([0, 2, 3, 3, 7])
        batch = SparseFeatures(
            keys=("y", "x"), values=ids, offsets=offsets, batch_size=2, weights=factors
        )
    else:
        ids, factors = ids[:6], None if factors is None else factors[:6]
        batch = SparseFeatures(
            keys=("y", "x"), values=ids, hotness=(1, 2), batch_size=2, weights=factors
        )
    return (batch,)


BAGS = [(0, [0, 1]), (0, []), (0, [2, 3, 4, 5])]
FIXED = [(0, [2, 3]), (1, [0]), (0, [4, 5]), (1, [1])]
JAGGED = [(0, []), (1, [0, 1]), (0, [3, 4, 5, 6]), (1, [2])]


def bag(mode: str, *, jagged: bool, weighted: bool = False) -> Case:
    def arguments(factors: Tensor | None) -> tuple[object, ...]:
        if jagged:
            weights = None if factors is None else factors[:6]
            return torch.tensor(IDS)[:6], torch.tensor([0, 2, 2]), weights
        return (torch.tensor(IDS)[:6].view(2, 3),)

    of = BAGS if jagged else [(0, [0, 1, 2]), (0, [3, 4, 5])]
    return Case(
        make=lambda device: torchembed.EmbeddingBag(ROWS[0], DIM, mode=mode, device=device),
        arguments=arguments,
        of=of,
        pooling=mode,
        weighted=weighted,
    )


CASES = {
    "bags": bag("sum", jagged=False),
    "weighted bags": bag("sum", jagged=True, weighted=True),
    "means": bag("mean", jagged=True),
    "maxima": bag("max", jagged=False),
    "embedding": Case(
        make=lambda device: torchembed.Embedding(ROWS[0], DIM, device=device),
        arguments=lambda _: (torch.tensor(IDS),),
        of=[(0, [position]) for position in range(len(IDS))],
    ),
    "fixed bags of a collection": Case(
        make=bags_of_collection,
        arguments=lambda factors: features(factors, jagged=False),
        of=FIXED,
    ),
    "jagged weighted bags of a collection": Case(
        make=lambda device: bags_of_collection(device, is_weighted=True),
        arguments=lambda factors: features(factors, jagged=True),
        of=JAGGED,
        weighted=True,
    ),
    "fixed ids of a collection": Case(
        make=ids_of_collection,
        arguments=lambda factors: features(factors, jagged=False),
        of=[*((0, [position]) for position in (2, 3, 4, 5)), (1, [0]), (1, [1])],
    ),
    "jagged ids of a collection": Case(
        make=ids_of_collection,
        arguments=lambda factors: features(factors, jagged=True),
        of=[*((0, [n]) for n in (3, 4, 5, 6)), *((1, [n]) for n in (0, 1, 2))],
    ),
}


def rows_of(case: Case, shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Whole numbers; where maxima are taken different ones, since derivatives of ties differ."""
    if case.pooling == "max":
        return torch.arange(shape.numel(), device=device).roll(seed).view(shape).float() - 7
    return whole(*shape, seed=seed, largest=1, device=device)


def made(case: Case, device: torch.device) -> nn.Module:
    module = case.make(device)
    with torch.no_grad():
        for number, weight in enumerate(module.parameters()):
            weight.copy_(rows_of(case, weight.shape, number, device))
    return module


def factors_of(case: Case, device: torch.device) -> Tensor | None:
    return whole(len(IDS), seed=9, device=device) if case.weighted else None


def on(device: torch.device, arguments: tuple[object, ...]) -> tuple[object, ...]:
    movable = (Tensor, SparseFeatures)
    return tuple(a.to(device) if isinstance(a, movable) else a for a in arguments)


def assert_exact(found: object, expected: object) -> None:
    """Assert that trees of tensors are equal; ``expected`` are float64."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    for ours, plain in pairs:
        assert ours.dtype == torch.float32
        assert torch.equal(ours.double(), plain)


def derivatives(call: Callable[[], Tensor], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The first, second and third derivatives of what comes of ``call``."""
    value, found = call().square().sum(), []
    for order in (1, 2, 3):
        grads = torch.autograd.grad(value, tensors, create_graph=order < 3)
        value = sum((g.square().sum() for g in grads), torch.zeros((), device=value.device))
        found.append([g.detach() for g in grads])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_lookup_is_differentiated_again_and_again(name: str, device: torch.device) -> None:
    case = CASES[name]
    module, factors = made(case, device), factors_of(case, device)
    given = [] if factors is None else [factors.requires_grad_()]
    tensors = [*module.parameters(), *given]
    found = derivatives(lambda: tensors_of(module(*on(device, case.arguments(factors)))), tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    tables = exact[: len(tensors) - len(given)]
    expected = derivatives(lambda: case.plain(tables, exact[-1] if given else None), exact)
    assert_exact(found, expected)
    assert all(any(g.count_nonzero() > 0 for g in grads) for grads in found)


def loss_of_weights(
    case: Case, module: nn.Module, factors: Tensor | None, device: torch.device
) -> Callable[..., Tensor]:
    def loss(*weights: Tensor) -> Tensor:
        given = dict(zip(dict(module.named_parameters()), weights, strict=True))
        result = functional_call(module, given, on(device, case.arguments(factors)))
        return tensors_of(result).square().sum()

    return loss


TRANSFORMS: dict[str, Callable[..., object]] = {
    "hessian": lambda loss, weights, moved: hessian(loss, tuple(range(len(weights))))(*weights),
    "jacrev": lambda loss, weights, moved: jacrev(loss)(*weights),
    "jvp": jvp,
    "jvp of grad": lambda loss, weights, moved: jvp(grad(loss), weights, moved),
    "vmap of grad": lambda loss, weights, moved: vmap(grad(loss))(
        *(torch.stack(pair) for pair in zip(weights, moved, strict=True))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's
@pytest.mark.usefixtures("fastest_algorithms")  # torch's maximum has no other backward on a GPU
def test_transforms_give_derivatives(name: str, transform: str, device: torch.device) -> None:
    case = CASES[name]
    module, factors = made(case, device), factors_of(case, device)
    weights = tuple(weight.detach() for weight in module.parameters())
    moved = tuple(rows_of(case, w.shape, 5, device) for w in weights)
    apply = TRANSFORMS[transform]
    found = apply(loss_of_weights(case, module, factors, device), weights, moved)

    def plain(*tables: Tensor) -> Tensor:
        return case.plain(tables, None if factors is None else factors.double()).square().sum()

    exact = [tuple(tensor.double() for tensor in tensors) for tensors in (weights, moved)]
    assert_exact(found, apply(plain, *exact))


@pytest.mark.parametrize("sparse", [False, True])
def test_penalties_of_gradients_train_a_table(sparse: bool, device: torch.device) -> None:
    trained = []
    for kind in (torchembed.Embedding, nn.Embedding):
        module, ids = kind(ROWS[0], DIM, sparse=sparse, device=device), torch.tensor(IDS[:4])
        with torch.no_grad():
            module.weight.copy_(whole(ROWS[0], DIM, seed=1, largest=1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        for _ in range(2):
            loss = module(ids.to(device)).square().sum()
            (of_table,) = torch.autograd.grad(loss, module.weight, create_graph=True)
            optimizer.zero_grad()
            (loss + of_table.to_dense().square().sum()).backward()
            optimizer.step()
        trained.append(module.weight.detach())
    assert torch.equal(*trained)


def test_gradients_of_weights_of_ids_are_summed_and_differentiated(device: torch.device) -> None:
    """The gradient of a sum is one number, expanded."""
    bag = torchembed.EmbeddingBag(ROWS[0], DIM, mode="sum", device=device)
    with torch.no_grad():
        bag.weight.copy_(whole(ROWS[0], DIM, seed=1, largest=1))
    ids = torch.tensor([[0, 3], [2, 4]], device=device)
    factors = torch.ones(2, 2, device=device, requires_grad=True)
    loss = bag(ids, per_sample_weights=factors).square().sum()
    (of_factors,) = torch.autograd.grad(loss, factors, create_graph=True)
    of_factors.sum().backward()
    rows = bag.weight.detach()[ids]
    assert factors.grad is not None
    assert torch.equal(factors.grad, 2 * (rows * rows.sum(1, keepdim=True)).sum(2))
    sums = rows.sum(1)
    expected = torch.zeros_like(rows[0, 0]).expand_as(bag.weight).clone()
    for number, of_bag in enumerate(ids.tolist()):
        # Of 2 * (r + s) @ (r + s), by r and by s.
        for id_ in of_bag:
            expected[id_] += 4 * sums[number]
    assert bag.weight.grad is not None
    assert torch.equal(bag.weight.grad, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_fused_optimizers_refuse_second_derivatives(device: torch.device) -> None:
    message = "lookup in tables that an optimizer of torchembed's updates has no second derivative"
    ids, starts = torch.tensor(IDS, device=device), torch.tensor([0, 3], device=device)
    for module, bags in (
        (torchembed.Embedding(ROWS[0], DIM, device=device), (ids,)),
        (torchembed.EmbeddingBag(ROWS[0], DIM, device=device), (ids, starts)),
    ):
        optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(module(*bags).sum(), module.weight, create_graph=True)
        assert not optimizer.recorded()
        # A graph that is not gone back through is no second derivative.
        module(*bags).sum().backward(create_graph=True)
        assert len(optimizer.recorded()) == 1
    weighted = torchembed.EmbeddingBag(ROWS[0], DIM, mode="sum", device=device)
    torchembed.optim.SGD(weighted.parameters(), lr=0.1)
    factors = torch.ones(len(IDS), device=device, requires_grad=True)
    out = weighted(ids, starts, factors)
    (of_factors,) = torch.autograd.grad(out.square().sum(), factors, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        of_factors.sum().backward()


def test_sparse_gradients_of_weighted_bags_refuse_second_derivatives(
    device: torch.device,
) -> None:
    module = torchembed.EmbeddingBag(ROWS[0], DIM, mode="sum", sparse=True, device=device)
    ids, starts = torch.tensor(IDS, device=device), torch.tensor([0, 3], device=device)
    loss = module(ids, starts, torch.ones(len(IDS), device=device, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"sparse gradients and weights .* use sparse=False"):
        torch.autograd.grad(loss, module.weight, create_graph=True)
