"""Rows of TorchRec's own managed collision modules, by id."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.clicks import import_torchrec
from tests.support.row_chunks import rows_by_key
from torchembed.checkpoints import managed_collision_rows

NUM_ROWS, DIM = 8, 4
PREFIX = "_managed_collision_collection._managed_collision_modules.user."


def jagged(ids: Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import JaggedTensor

    return {"f": JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))}


@pytest.mark.parametrize("policy", ["LFU", "LRU", "DistanceLFU"])
def test_a_trained_mch_table(policy: str) -> None:
    torchrec = import_torchrec()
    from torchrec.modules import mc_modules
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    device = torch.device("cpu")
    config = torchrec.EmbeddingBagConfig(
        name="user", embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=["f"]
    )
    module = mc_modules.MCHManagedCollisionModule(
        zch_size=NUM_ROWS,
        device=device,
        eviction_policy=getattr(mc_modules, f"{policy}_EvictionPolicy")(),
        eviction_interval=2,
    )
    model = ManagedCollisionEmbeddingBagCollection(
        torchrec.EmbeddingBagCollection(tables=[config], device=device),
        mc_modules.ManagedCollisionCollection({"user": module}, [config]),
    )
    generator = torch.Generator().manual_seed(0)
    seen = torch.empty(0, dtype=torch.int64)
    for _ in range(10):
        # Ids of more than 32 bits of either sign, more of them than there are rows.
        ids = torch.randint(-9, 9, (6,), generator=generator) * 2**40
        seen = torch.cat([seen, ids]).unique()
        lengths = torch.ones(len(ids), dtype=torch.int64)
        model(torchrec.KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths))
    model.eval()
    state = model.state_dict()
    weight = state["_embedding_module.embedding_bags.user.weight"]
    rows = rows_by_key(managed_collision_rows(state, weight, prefix=PREFIX))
    places = module.remap(jagged(seen))["f"].values()
    expected = {
        key: weight[place].tolist()
        for key, place in zip(seen.tolist(), places.tolist(), strict=True)
        if place != NUM_ROWS - 1  # which all ids without a row of their own have
    }
    assert len(expected) == NUM_ROWS - 1 < len(seen)
    assert {key: row.values for key, row in rows.items()} == expected
    assert all((row.score is not None) == (policy != "LRU") for row in rows.values())
    assert all((row.touched is not None) == (policy != "LFU") for row in rows.values())


def test_an_mpzch_table() -> None:
    import_torchrec()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, which it calls when imported
        from torchrec.modules import hash_mc_evictions, hash_mc_modules

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tensor that TorchRec makes of another one
            return hash_mc_modules.HashZchManagedCollisionModule(
                zch_size=NUM_ROWS,
                device=torch.device("cpu"),
                total_num_buckets=2,
                eviction_policy_name=hash_mc_evictions.HashZchEvictionPolicyName.LRU_EVICTION,
                eviction_config=hash_mc_evictions.HashZchEvictionConfig(
                    features=["f"], single_ttl=10
                ),
                track_id_freq=True,
            )

    # FBGEMM inserts ids on a GPU alone, and finds them on a CPU too: each id goes where the module
    # then finds it.
    module, reader = make(), make()
    reader.reset_inference_mode()
    identities = reader._hash_zch_identities.data
    placed = {}
    for key in (5, 2**62, 0, 7, 100, 2**63 - 1):
        for place in range(NUM_ROWS):
            if identities[place, 0] != -1:
                continue
            identities[place, 0] = key
            if reader.remap(jagged(torch.tensor([key])))["f"].values().tolist() == [place]:
                placed[key] = place
                break
            identities[place, 0] = -1
    assert len(placed) >= 4
    module._hash_zch_identities.data.copy_(identities)
    module._hash_zch_metadata.copy_(torch.arange(NUM_ROWS).reshape(-1, 1) + 1000)
    weight = torch.arange(NUM_ROWS * DIM).float().reshape(NUM_ROWS, DIM)
    rows = rows_by_key(managed_collision_rows(module.state_dict(), weight))
    assert {key: row.values for key, row in rows.items()} == {
        key: weight[place].tolist() for key, place in placed.items()
    }
    assert {key: row.score for key, row in rows.items()} == {
        key: place + 1000 for key, place in placed.items()
    }
