"""Whatever can be taken for a batch becomes one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tolerance import assert_same_bits
from torchembed.core.features import SparseFeatures
from torchembed.data import Batch, as_batch

DENSE = torch.arange(6, dtype=torch.float64).view(3, 2)
LABELS = torch.tensor([1, 0, 1])
IDS = torch.tensor([[1, 4], [2, 5], [3, 6]])
SPARSE = SparseFeatures(
    keys=("cat_0", "cat_1"), values=torch.tensor([1, 2, 3, 4, 5, 6]), batch_size=3, hotness=(1, 1)
)


class Jagged:
    """The methods that are asked of a KeyedJaggedTensor."""

    def keys(self) -> list[str]:
        return ["cat_0", "cat_1"]

    def values(self) -> torch.Tensor:
        return SPARSE.values

    def offsets(self) -> torch.Tensor:
        return torch.arange(7)

    def weights_or_none(self) -> None:
        return None

    def stride(self) -> int:
        return 3


@pytest.mark.parametrize(
    "sparse",
    [SPARSE, IDS, IDS.numpy(), {"cat_0": IDS[:, 0], "cat_1": IDS[:, 1:]}, Jagged()],
    ids=["features", "tensor", "array", "mapping", "jagged"],
)
@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None].float(), LABELS.bool(), [1, 0, 1]])
def test_parts_are_normalised(sparse: Any, labels: Any) -> None:
    batch = as_batch((DENSE, sparse, labels))
    assert isinstance(batch, Batch)
    assert_same_bits(batch.dense, DENSE.float())
    # Labels are given to the loss as they are.
    assert_same_bits(batch.labels, torch.as_tensor(labels))
    assert batch.sparse.keys == ("cat_0", "cat_1")
    assert batch.sparse.batch_size == 3
    assert batch.sparse.values.tolist() == [1, 2, 3, 4, 5, 6]


def test_bags_of_a_mapping_keep_their_hotness() -> None:
    ids = {"a": np.array([[1, 2], [3, 4]]), "b": np.array([5, 6]), "none": np.zeros((2, 0), int)}
    batch = as_batch((np.zeros((2, 1)), ids, np.zeros(2)))
    assert batch.sparse.hotness == (2, 1, 0)
    assert batch.sparse.values.tolist() == [1, 2, 3, 4, 5, 6]
    empty = {"a": np.zeros((0, 2), int)}
    assert as_batch((np.zeros((0, 1)), empty, np.zeros(0))).sparse.hotness == (2,)


def test_keys_name_the_columns() -> None:
    assert as_batch((DENSE, IDS, LABELS), keys=("user", "item")).sparse.keys == ("user", "item")
    with pytest.raises(ValueError, match="keys must name 2 features of sparse, got 1"):
        as_batch((DENSE, IDS, LABELS), keys=("user",))


def test_batches_pass_through() -> None:
    batch = Batch(DENSE.float(), SPARSE, LABELS.float())
    assert as_batch(batch) is batch
    torchrec_like = SimpleNamespace(dense_features=DENSE, sparse_features=SPARSE, labels=LABELS)
    assert as_batch(torchrec_like).sparse is SPARSE
    assert_same_bits(batch.to("cpu").labels, batch.labels)


def test_labels_may_be_of_any_shape_and_several() -> None:
    tasks = as_batch((None, IDS, {"click": [1, 0, 1], "price": torch.rand(3, 2)}))
    assert tasks.dense is None
    assert tasks.labels["click"].dtype == torch.int64
    assert tasks.to("cpu").labels["price"].shape == (3, 2)
    with pytest.raises(ValueError, match="one number of samples, got 3, 3 and 3, 2"):
        as_batch((DENSE, IDS, (LABELS, LABELS[:2])))


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (5, TypeError, r"a batch must be \(dense, sparse, labels\), got int"),
        ((DENSE, IDS), TypeError, r"got 2 parts"),
        ((DENSE[0], IDS, LABELS), ValueError, r"dense must be \[B, num_dense\], got \[2\]"),
        ({"dense": DENSE, "sparse": IDS, "y": LABELS}, TypeError, "got dict of dense, sparse, y"),
        ((DENSE[:2], IDS, LABELS), ValueError, "one number of samples, got 2, 3 and 3"),
        ((DENSE, IDS[:, 0], LABELS), ValueError, r"sparse must be ids \[B, F\], got \[3\]"),
        (
            (DENSE, IDS.float(), LABELS),
            TypeError,
            "sparse must be int32 or int64 or uint32 or uint64",
        ),
        (
            (DENSE, {"a": IDS, "b": IDS[:2]}, LABELS),
            ValueError,
            r"must map each feature to ids .* with one B, got the shapes {'a': \[3, 2\]",
        ),
        ((DENSE, {"a": IDS[None]}, LABELS), ValueError, r"got the shapes {'a': \[1, 3, 2\]}"),
        (
            (DENSE, {"a": IDS, "b": ["x", "y", "z"]}, LABELS),
            TypeError,
            r"ids of feature b must be a tensor, or an array or lists of numbers, got list \(too",
        ),
        (
            (DENSE, {"a": np.array(["x", "y", "z"])}, LABELS),
            TypeError,
            r"ids of feature a must be a tensor, or an array or lists of numbers, got ndarray",
        ),
        ((DENSE, [["x"]], LABELS), TypeError, r"sparse must be a tensor, or .*, got list \(too"),
        (
            (DENSE, {"a": IDS, "b": np.array([1.0, 2.0, np.nan])}, LABELS),
            TypeError,
            r"ids of feature b must be int32 or int64 .*, got float64; call \.long\(\)",
        ),
        ((DENSE, torch.ones(3, 2), LABELS), TypeError, r"sparse must be int32 .*, got float32"),
        (([[None]], IDS, LABELS), TypeError, r"dense must be a tensor, or .*, got list \(Could"),
        ((DENSE, IDS, "yes"), TypeError, r"labels must be a tensor, or .*, got str \("),
    ],
)
def test_other_things_are_refused(item: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_batch(item)
