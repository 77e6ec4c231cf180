"""Dynamic tables in the modules: rows for whatever ids training meets."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchembed
from tests.support.dynamic_tables import ids_held, index_of
from tests.support.tolerance import assert_same_bits
from torchembed import (
    LFU,
    LRU,
    Dynamic,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EpochLFU,
    Normal,
    SparseFeatures,
    Uniform,
)
from torchembed.ops.hash_table import Counter

ANY_IDS = [-1, 0, 2**63 - 1, -(2**63), 7]
NUM_ROWS = 40
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torchembed.optim.SGD,
    "adagrad": torchembed.optim.Adagrad,
    "rowwise_adagrad": torchembed.optim.RowwiseAdagrad,
    "adam": torchembed.optim.Adam,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def one_id_a_bag(ids: list[int], key: str = "f") -> SparseFeatures:
    return SparseFeatures(keys=(key,), values=torch.tensor(ids), batch_size=len(ids), hotness=(1,))


def bags(capacity: int, dynamic: Dynamic | None = None, **settings: Any) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=capacity,
        embedding_dim=4,
        feature_names=("f",),
        dynamic=dynamic or Dynamic(),
        **settings,
    )
    return EmbeddingBagCollection([config])


def counted(module: EmbeddingBagCollection, counter: Counter) -> int:
    return int(index_of(module).hash_tables.counters[:, counter].sum())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *batches: Any) -> list[Tensor]:
    """A step on each batch; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        vectors = module(batch)
        values = vectors.values() if hasattr(vectors, "keys") else vectors
        if isinstance(vectors, dict):
            values = torch.cat([of_slot.values() for of_slot in vectors.values()])
        weights = torch.linspace(0.5, 1.5, values.numel()).view_as(values)
        loss = (values.float() * weights).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def jagged(seed: int, keys: tuple[str, ...] = ("f", "g", "h"), batch_size: int = 6) -> Any:
    """Bags of 0 to 3 ids with weights; all ids come again and again."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(keys) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_ids = int(offsets[-1])
    return SparseFeatures(
        keys=keys,
        values=torch.randint(NUM_ROWS, (num_ids,), generator=generator),
        batch_size=batch_size,
        offsets=offsets,
        weights=torch.rand(num_ids, generator=generator),
    )


def fixed(seed: int, keys: tuple[str, ...] = ("f", "g", "h"), batch_size: int = 6) -> Any:
    generator = torch.Generator().manual_seed(seed)
    hotness = tuple(range(1, len(keys) + 1))
    values = torch.randint(NUM_ROWS, (sum(hotness) * batch_size,), generator=generator)
    return SparseFeatures(keys=keys, values=values, batch_size=batch_size, hotness=hotness)


def twins(
    kind: type[EmbeddingBagCollection] | type[EmbeddingCollection], dtype: torch.dtype, **other: Any
) -> list[Any]:
    """The same tables dynamic and static: two in one group, of which two features share one, and a
    third that is static in both."""
    config = EmbeddingBagConfig if kind is EmbeddingBagCollection else EmbeddingConfig
    settings = {"num_embeddings": NUM_ROWS, "embedding_dim": 4, "dtype": dtype}
    return [
        kind(
            [
                config(name="a", feature_names=("f", "h"), dynamic=dynamic, **settings),
                config(name="b", feature_names=("g",), dynamic=dynamic, **settings),
                config(name="c", feature_names=("g",), **settings),
            ],
            seed=3,
            **other,
        )
        for dynamic in (Dynamic(), None)
    ]


def assert_twins(dynamic: Any, static: Any) -> None:
    """Assert that each id that the dynamic tables hold has the static ones' row."""
    for ours, theirs in zip(dynamic.table_set.tables, static.table_set.tables, strict=True):
        contents = ours.index_contents()
        rows = torch.arange(NUM_ROWS)
        if contents:
            is_held = contents["digests"] > 0
            assert is_held.any()
            assert_same_bits(
                ours.parameter.data[is_held], theirs.parameter.data[contents["ids"][is_held]]
            )
        else:
            assert_same_bits(ours.parameter.data[rows], theirs.parameter.data[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make_batch", [jagged, fixed])
def test_a_dynamic_table_trains_as_a_static_one(
    make_batch: Callable[[int], Any], optimizer: str, dtype: torch.dtype
) -> None:
    """While nothing is evicted, losses and rows are the static table's, bit for bit."""
    ours, theirs = twins(EmbeddingBagCollection, dtype)
    batches = [make_batch(seed) for seed in range(8)]
    losses = [
        train(module, OPTIMIZERS[optimizer](module.parameters(), lr=0.1), *batches)
        for module in (ours, theirs)
    ]
    assert losses[0] == losses[1]
    assert_twins(ours, theirs)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weighted_bags_and_means_train_as_static_ones(pooling: str) -> None:
    losses = []
    for dynamic in (Dynamic(), None):
        config = EmbeddingBagConfig(
            name="t",
            num_embeddings=NUM_ROWS,
            embedding_dim=4,
            feature_names=("f", "g", "h"),
            pooling=pooling,  # type: ignore[arg-type]
            dynamic=dynamic,
        )
        module = EmbeddingBagCollection([config], is_weighted=pooling == "sum")
        optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
        losses.append(train(module, optimizer, *map(jagged, range(5))))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("make_batch", [jagged, fixed])
def test_sequences_train_as_static_ones(make_batch: Callable[[int], Any]) -> None:
    ours, theirs = twins(EmbeddingCollection, torch.float32)
    batches = [make_batch(seed) for seed in range(8)]
    losses = [
        train(module, torchembed.optim.Adam(module.parameters(), lr=0.1), *batches)
        for module in (ours, theirs)
    ]
    assert losses[0] == losses[1]
    assert_twins(ours, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_module_of_one_dynamic_table_trains_as_a_static_one(
    mode: str, padding_idx: int | None
) -> None:
    losses = []
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(NUM_ROWS, (5, 3), generator=generator) for _ in range(6)]
    for dynamic in (Dynamic(), None):
        for module in (
            EmbeddingBag(NUM_ROWS, 4, mode=mode, padding_idx=padding_idx, dynamic=dynamic, seed=1),
            Embedding(NUM_ROWS, 4, padding_idx=padding_idx, dynamic=dynamic, seed=1),
        ):
            optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
            losses.append(train(module, optimizer, *batches))
    # Normal rows of a dynamic table are near a static one's, and not equal.
    for ours, theirs in zip(losses[:2], losses[2:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_64_bit_integer_is_an_id() -> None:
    module = bags(5)
    found = module(one_id_a_bag(ANY_IDS)).values()
    assert ids_held(module) == set(ANY_IDS)
    assert len(found.unique(dim=0)) == 5
    again = module.eval()(one_id_a_bag(ANY_IDS)).values()
    assert_same_bits(found, again)


def test_initial_rows_are_functions_of_the_id() -> None:
    """In whatever order, and in whatever table of other capacity ids come."""
    initializer = Normal(std=0.5)
    one, other = bags(5, initializer=initializer), bags(300, initializer=initializer)
    of_one = one(one_id_a_bag(ANY_IDS)).values()
    of_other = other(one_id_a_bag([1, 2, *ANY_IDS[::-1]])).values()[2:].flip(0)
    assert_same_bits(of_one, of_other)


def test_evaluation_inserts_nothing_and_counts_no_use() -> None:
    module = bags(5)
    module(one_id_a_bag([1, 2])).values().sum().backward()
    before = copy.deepcopy(index_of(module).hash_tables)
    module.eval()(one_id_a_bag([1, 3]))
    with torch.no_grad():
        vectors = module.train()(one_id_a_bag([3, 1])).values()
    module.lookup(one_id_a_bag([1, 4]))
    weight = next(module.parameters()).requires_grad_(False)
    module(one_id_a_bag([1, 5]))
    weight.requires_grad_(True)
    for was, now in zip(before, index_of(module).hash_tables, strict=True):
        assert was is now or torch.equal(was, now)
    assert not vectors[0].any()
    assert vectors[1].any()


def test_the_least_recently_used_rows_make_room() -> None:
    module = bags(4)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, *map(one_id_a_bag, ([1, 2], [3, 4], [1], [5, 6])))
    assert ids_held(module) == {1, 5, 6, 3} or ids_held(module) == {1, 5, 6, 4}
    assert counted(module, Counter.EVICTED_FULL) == 2


def test_the_least_frequently_used_rows_make_room() -> None:
    """Occurrences in a batch count one by one, and a new id must not be rarer than who goes."""
    module = bags(3, Dynamic(eviction=LFU()))
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, *map(one_id_a_bag, ([1, 1, 1, 2, 2, 3], [1], [5])))
    assert ids_held(module) == {1, 2, 5}
    train(module, optimizer, *map(one_id_a_bag, ([1], [6, 6], [1], [7])))
    assert ids_held(module) == {1, 6, 2}
    assert counted(module, Counter.REFUSED) == 1


def test_rows_of_older_epochs_make_room_first() -> None:
    module = bags(2, Dynamic(eviction=EpochLFU(steps_per_epoch=4)))
    optimizer = torchembed.optim.SGD(module.parameters(), lr=0.1)
    batches = [[1, 1, 1], [2], [2], [2], [2], [3]]
    train(module, optimizer, *map(one_id_a_bag, batches))
    assert ids_held(module) == {2, 3}


def test_ids_without_a_row_read_zeros_and_get_no_gradient() -> None:
    module = bags(2)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    vectors = module(one_id_a_bag([1, 2, 3])).values()
    assert counted(module, Counter.REFUSED) == 1
    is_refused = vectors.abs().sum(1) == 0
    assert is_refused.sum() == 1
    before = next(module.parameters()).detach().clone()
    vectors.sum().backward()
    optimizer.step()
    assert_same_bits(next(module.parameters()).detach(), before - 1.0)


def test_rows_keep_their_places_until_an_update_has_trained_them() -> None:
    """Gradients accumulated over two batches are those of the ids that were looked up."""
    module = bags(2)
    optimizer = torchembed.optim.SGD(module.parameters(), lr=1.0)
    for ids in ([1, 2], [3, 4]):
        module(one_id_a_bag(ids)).values().sum().backward()
        assert ids_held(module) == {1, 2}
    optimizer.step()
    train(module, optimizer, one_id_a_bag([1]), one_id_a_bag([3]))
    assert ids_held(module) == {1, 3}


def test_a_new_row_starts_without_the_state_of_the_one_before() -> None:
    """A row that comes again after its eviction trains as it did when it came first."""
    for make in OPTIMIZERS.values():
        module = bags(2)
        optimizer = make(module.parameters(), lr=0.5)
        losses = train(
            module, optimizer, *map(one_id_a_bag, ([1, 2], [1, 2], [5], [3, 4], [5], [1, 2]))
        )
        assert losses[0] == losses[-1]
        assert losses[1] < losses[0]


@pytest.mark.parametrize("dynamic", [Dynamic(), Dynamic(eviction=LFU())], ids=["lru", "lfu"])
def test_a_state_dict_holds_ids_and_the_use_of_rows(dynamic: Dynamic) -> None:
    batches = [one_id_a_bag(ids) for ids in ([1, 2, 3], [2, 9], [1, -5], [8, 7], [2, 3, 9])]
    module = bags(4, dynamic)
    optimizer = torchembed.optim.Adagrad(module.parameters(), lr=0.1)
    train(module, optimizer, *batches[:3])
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    of_module, of_optimizer = torch.load(file)
    resumed = bags(4, dynamic)
    train(resumed, torchembed.optim.SGD(resumed.parameters(), lr=1.0), one_id_a_bag([70, 80]))
    resumed.load_state_dict(of_module)
    its_optimizer = torchembed.optim.Adagrad(resumed.parameters(), lr=0.1)
    its_optimizer.load_state_dict(of_optimizer)
    assert ids_held(resumed) == ids_held(module)
    assert train(resumed, its_optimizer, *batches[3:]) == train(module, optimizer, *batches[3:])
    for name, tensor in module.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], tensor)


def test_a_state_dict_without_ids_is_refused() -> None:
    module, static = bags(4), bags(4)
    of_module = {k: v for k, v in static.state_dict().items() if k.endswith("weight")}
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.t\.index\.ids"):
        module.load_state_dict(of_module)
    of_other = {**static.state_dict(), "embedding_bags.t.index.ids": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"index\.ids must have shape \(4,\), got \(3,\)"):
        module.load_state_dict(of_other)


def test_copies_hold_the_same_ids() -> None:
    module = bags(4)
    found = module(one_id_a_bag([1, -2, 3])).values()
    bag = EmbeddingBag(4, 3, mode="sum", dynamic=Dynamic())
    of_bag = bag(torch.tensor([[1, 2]]))
    for twin in (copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module))):
        twin(one_id_a_bag([4]))
        assert_same_bits(twin.eval()(one_id_a_bag([1, -2, 3])).values(), found)
        assert ids_held(module) == {1, -2, 3}
    assert_same_bits(copy.deepcopy(bag).eval()(torch.tensor([[2, 1]])), of_bag)


def test_tables_that_change_groups_keep_the_rows_of_their_ids() -> None:
    module, _ = twins(EmbeddingBagCollection, torch.float32)
    batch = fixed(0)
    before = module(batch).values()
    weight_of = {table.spec.name: table.parameter for table in module.table_set.tables}
    changes = (
        lambda: weight_of["b"].requires_grad_(False),
        lambda: weight_of["b"].requires_grad_(True),
        lambda: torchembed.optim.SGD([weight_of["b"]], lr=1.0),
        lambda: module.double().float(),
    )
    for change in changes:
        change()
        assert_same_bits(module.eval()(batch).values(), before)


def test_a_module_on_the_meta_device_gets_an_empty_table() -> None:
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="t",
                num_embeddings=5,
                embedding_dim=4,
                feature_names=("f",),
                dynamic=Dynamic(),
            )
        ],
        device="meta",
    )
    module.to_empty(device="cpu").reset_parameters()
    assert ids_held(module) == set()
    assert_same_bits(
        module(one_id_a_bag(ANY_IDS)).values(), bags(5)(one_id_a_bag(ANY_IDS)).values()
    )


def test_tables_of_other_policies_form_other_groups() -> None:
    policies = {"a": LRU(), "b": LFU(), "c": LRU()}
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=5,
                embedding_dim=4,
                feature_names=(name,),
                dynamic=Dynamic(eviction=eviction),
            )
            for name, eviction in policies.items()
        ]
    )
    groups = module.table_set.current_groups()
    assert [[t.spec.name for t in group.tables] for group in groups] == [["a", "c"], ["b"]]


def test_bad_settings_are_refused_by_name() -> None:
    def fill(rows: Tensor) -> None:
        rows.zero_()

    in_place = torchembed.InPlaceFunction(fill)
    errors = (
        (TypeError, r"eviction must be LRU\(\)", lambda: Dynamic(eviction="lru")),  # type: ignore[arg-type]
        (ValueError, "steps_per_epoch must be at least 1", lambda: EpochLFU(steps_per_epoch=0)),
        (TypeError, "steps_per_epoch must be an int", lambda: EpochLFU(steps_per_epoch=1.5)),  # type: ignore[arg-type]
        (TypeError, "initializer of table t must be", lambda: bags(4, initializer=in_place)),
        (TypeError, "dynamic of table t must be a Dynamic", lambda: bags(4, LRU())),  # type: ignore[arg-type]
        (ValueError, "num_embeddings of table t must be positive", lambda: bags(0)),
        (
            ValueError,
            "num_embeddings of a dynamic table must be positive",
            lambda: EmbeddingBag(0, 4, dynamic=Dynamic()),
        ),
        (
            ValueError,
            "_weight must be None",
            lambda: Embedding(2, 2, _weight=torch.zeros(2, 2), dynamic=Dynamic()),
        ),
        (TypeError, "table t must not be dynamic", bags(4).to_torch),
        (
            TypeError,
            "this module must not be dynamic",
            EmbeddingBag(2, 2, dynamic=Dynamic()).to_torch,
        ),
    )
    for kind, message, call in errors:
        with pytest.raises(kind, match=message):
            call()


def test_uniform_rows_are_within_the_bounds_of_as_many_rows() -> None:
    """A capacity that is rounded up, and one that is not."""
    for capacity in (1001, 1000):
        module = bags(capacity)
        (table,) = module.table_set.tables
        assert table.num_rows >= capacity
        assert table.spec.initializer == Uniform(low=-(capacity**-0.5), high=capacity**-0.5)


class _Searches(TorchDispatchMode):
    """Counts how often ids are looked for."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.torchembed.find_slots.default
        return func(*args, **(kwargs or {}))


def test_ids_are_looked_for_once_in_each_forward() -> None:
    module, bag = bags(8), EmbeddingBag(8, 4, mode="sum", dynamic=Dynamic())
    ids = torch.tensor([[3, 5]])
    for is_trained, size in ((True, 2), (True, 2), (False, 2)):
        module.train(is_trained)
        bag.train(is_trained)
        for forward, given in ((module, one_id_a_bag([3, 5])), (bag, ids)):
            with _Searches() as searches:
                forward(given)
            assert searches.count == 1
        assert counted(module, Counter.SIZE) == size


def test_ids_of_frozen_tables_are_looked_for_and_not_admitted() -> None:
    module = bags(8)
    module(one_id_a_bag([3]))
    vectors = module(one_id_a_bag([3, 5]))["f"].detach()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with _Searches() as searches:
        found = module(one_id_a_bag([5, 3, 9]))["f"]
    assert searches.count == 1
    assert_same_bits(found[:2], vectors.flip(0))
    assert not found[2].any()
    assert counted(module, Counter.SIZE) == 2
