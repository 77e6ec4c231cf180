"""What was forgotten or broken before sharding is named."""

import pytest
import torch

import torchembed
from tests.support.sharded_cases import Case, make_batch, make_model


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_lookup_in_tables_that_were_never_sharded(pooled: bool, fixed: bool) -> None:
    case = Case(placements={}, pooled=pooled, fixed=fixed)
    model = make_model(case, "meta")
    with pytest.raises(RuntimeError, match="are on the meta device and have no rows; call shard_"):
        model.tables(make_batch(case, 0, 0))


def test_a_lookup_in_a_bag_on_the_meta_device() -> None:
    bag = torchembed.EmbeddingBag(9, 4, device="meta")
    with pytest.raises(RuntimeError, match="tables weight are on the meta device"):
        bag(torch.tensor([[1, 2]]))
