"""Row indices: what a range says of ids, and that any other index takes its place."""

import pytest
import torch

import torchembed
from tests.support.row_indices import DictBagConfig, DictConfig, DictIndex
from tests.support.tolerance import assert_same_bits
from torchembed import Normal, SparseFeatures, Uniform
from torchembed.core.types import OnBadId, OptimizerKind
from torchembed.ops.rowwise_update import RoundingKeys, RowGradients, UpdateRule, rowwise_update
from torchembed.ops.segments import find_runs
from torchembed.tables import IndexedTable, Initializer, RangeIndex

ANY_IDS = [-1, 0, 2**63 - 1, -(2**63), 7]


def features_of(ids: list[int], key: str = "f") -> SparseFeatures:
    return SparseFeatures(keys=(key,), values=torch.tensor(ids), batch_size=len(ids), hotness=(1,))


def dict_bags() -> torchembed.EmbeddingBagCollection:
    config = DictBagConfig(
        name="t", num_embeddings=5, embedding_dim=4, feature_names=("f",), initializer=Normal()
    )
    return torchembed.EmbeddingBagCollection([config])


def test_a_range_is_rows_one_after_the_other(device: torch.device) -> None:
    """Tables of 2 and 3 rows: ids 1, 0 and 2 are rows 1, 2 and 4; ids 2 and -1 have none."""
    tables = [IndexedTable(11, 0, 2, 0), IndexedTable(12, 10, 3, 0)]
    index = RangeIndex(tables, torch.device("cpu")).to(device)
    features = SparseFeatures(
        keys=("a", "b", "c"),
        values=torch.tensor([1, 0, 2, 2, -1], device=device),
        batch_size=1,
        hotness=(1, 2, 2),
    )
    slots = index.for_tables([0, 1, 0])
    for _ in range(2):
        rows, first_bad = slots.route(features, OnBadId.ZERO, torch.int32)
        assert rows.tolist() == [1, 2, 4, -1, -1]
        assert rows.dtype is torch.int32
        assert first_bad.tolist() == [3]
    assert [index.row_ids(0), index.row_ids(1)] == [range(2), range(10, 13)]
    assert not index.changes_on_admission


@pytest.mark.parametrize("initializer", [Uniform(), Normal()])
def test_initial_values_follow_the_id_of_a_row(initializer: Initializer) -> None:
    by_number, by_id = torch.empty(9, 3), torch.empty(4, 3)
    ids = torch.tensor([8, 0, 3, 5])
    initializer.fill(by_number, 99, range(9), 0, 9)
    initializer.fill(by_id, 99, ids, 0, 9)
    assert_same_bits(by_id, by_number[ids])


def test_rounding_follows_the_id_of_a_row(device: torch.device) -> None:
    """Rows in the order of admission round as they do where they lie in the order of ids."""
    order = [3, 0, 4, 1, 2]
    table = IndexedTable(1234567, 0, 5, 0)
    index = DictIndex([table], torch.device("cpu"))
    index.rows[0] = {row_id: row for row, row_id in enumerate(order)}
    grads = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(device)

    def updated(keys: RoundingKeys, ids: list[int]) -> torch.Tensor:
        weight = torch.full((5, 8), 1.0, dtype=torch.bfloat16, device=device)
        rowwise_update(
            weight,
            (),
            find_runs(torch.arange(5, device=device), 5),
            RowGradients(grads[torch.tensor(ids, device=device)]),
            UpdateRule(kind=OptimizerKind.SGD),
            torch.tensor([1e-3], device=device),
            step=torch.ones(1, device=device),
            rounding=RoundingKeys(keys.row_offsets.to(device), keys.row_keys.to(device)),
        )
        return weight

    in_order = updated(RangeIndex([table], device).rounding_keys(), list(range(5)))
    admitted = updated(index.rounding_keys(), order)
    assert_same_bits(admitted, in_order[torch.tensor(order, device=device)])
    assert len(in_order.unique()) > 1


def test_every_64_bit_integer_may_be_an_id() -> None:
    bags = dict_bags()
    config = DictConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=("f",))
    sequences = torchembed.EmbeddingCollection([config])
    features = features_of(ANY_IDS)
    vectors, (weight,) = bags(features).values(), bags.parameters()
    assert torch.equal(vectors, weight)
    vectors.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(5, 4))
    of_ids = sequences(features)["f"].values()
    assert torch.equal(of_ids, next(sequences.parameters()))


def test_evaluation_admits_nothing() -> None:
    bags, features = dict_bags(), features_of(ANY_IDS)
    assert bags.eval()(features).values().count_nonzero() == 0
    admitted = bags.train()(features_of(ANY_IDS[:2])).values()
    evaluated = bags.eval()(features).values()
    assert torch.equal(evaluated[:2], admitted)
    assert evaluated[2:].count_nonzero() == 0


def test_tables_of_different_indices_form_different_groups() -> None:
    names = ("a", "b", "c")
    configs = [
        kind(name=name, num_embeddings=5, embedding_dim=4, feature_names=(name,))
        for name, kind in zip(
            names, (DictBagConfig, torchembed.EmbeddingBagConfig, DictBagConfig), strict=True
        )
    ]
    collection = torchembed.EmbeddingBagCollection(configs)
    groups = collection.table_set.current_groups()
    assert [[t.spec.name for t in group.tables] for group in groups] == [["a", "c"], ["b"]]
    assert [t.spec.num_ids for t in collection.table_set.tables] == [None, 5, None]
    assert collection.admission_changes_tables
    ids = {"a": [-1, 3], "b": [0, 4], "c": [3, -1]}
    values = collection(SparseFeatures.from_dict(ids)).to_dict()
    weights = {t.spec.name: t.parameter for t in collection.table_set.tables}
    assert torch.equal(values["a"], weights["a"][:2])
    assert torch.equal(values["b"], weights["b"][[0, 4]])
    assert torch.equal(values["c"], weights["c"][:2])


def test_tables_that_change_groups_keep_the_rows_of_their_ids() -> None:
    """Freezing a table, and an optimizer that takes over tables, form groups anew."""
    names = ("a", "b")
    module = torchembed.EmbeddingBagCollection(
        [
            DictBagConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=(name,))
            for name in names
        ]
    )

    def vectors_of(ids: list[int]) -> torch.Tensor:
        features = SparseFeatures(
            keys=names, values=torch.tensor(2 * ids), batch_size=5, hotness=(1, 1)
        )
        return module(features).values()

    before = vectors_of(ANY_IDS)
    weight_of = {table.spec.name: table.parameter for table in module._tables}
    changes = (
        lambda: weight_of["b"].requires_grad_(False),
        lambda: weight_of["b"].requires_grad_(True),
        lambda: torchembed.optim.SGD([weight_of["b"]], lr=1.0),
    )
    for change in changes:
        groups = module._table_set.current_groups()
        change()
        # In another order, in which ids that are new would get other rows.
        assert_same_bits(vectors_of(ANY_IDS[::-1]), before.flip(0))
        assert module._table_set.current_groups() is not groups
