"""``DLRM`` and ``DLRM_DCNv2`` against TorchRec's, with the same values in every parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.model_batches import KEYS, NUM_ROWS, Clicks, clicks, collection
from tests.support.tolerance import assert_follows, assert_same_bits
from torchembed.models import DLRM, DeepFM, DLRM_DCNv2, WideAndDeep
from torchembed.modules import EmbeddingBagCollection, EmbeddingBagConfig

SIZES: dict[str, Any] = {
    "dense_in_features": 5,
    "dense_arch_layer_sizes": [6, 4],
    "over_arch_layer_sizes": [8, 7, 1],
}
CROSS_SIZES = SIZES | {"dcn_num_layers": 2, "dcn_low_rank_dim": 3}
EACH_MODEL = pytest.mark.parametrize(
    ("ours", "sizes"), [(DLRM, SIZES), (DLRM_DCNv2, CROSS_SIZES)], ids=["DLRM", "DLRM_DCNv2"]
)


def parameters_in_order(model: nn.Module) -> list[nn.Parameter]:
    """The parameters by their role, whoever's ``model`` it is."""
    cross: list[nn.Parameter] = []
    for module in model.modules():
        for names in (("v", "u", "bias"), ("V_kernels", "W_kernels", "bias")):
            if isinstance(getattr(module, names[0], None), nn.ParameterList):
                cross += [parameter for name in names for parameter in getattr(module, name)]
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [parameter for name, parameter in model.named_parameters() if "embedding_bags" in name]
    dense = [parameter for layer in linear for parameter in layer.parameters()]
    found = [*tables, *dense, *cross]
    assert {id(parameter) for parameter in found} == {id(p) for p in model.parameters()}
    return found


def results(model: nn.Module, batch: Clicks, sparse: Any, dtype: torch.dtype) -> list[Tensor]:
    """The logits, and the gradients of the dense features and of every parameter."""
    dense = batch.dense.detach().to(dtype).requires_grad_()
    logits = model(dense, sparse)
    leaves = [dense, *parameters_in_order(model)]
    return [logits, *torch.autograd.grad(logits, leaves, batch.grad.to(dtype))]


def torchrec_collection(dim: int = 4) -> nn.Module:
    modules = pytest.importorskip("torchrec.modules.embedding_modules", reason="needs TorchRec")
    configs = pytest.importorskip("torchrec.modules.embedding_configs", reason="needs TorchRec")
    tables = [
        configs.EmbeddingBagConfig(
            name="users", num_embeddings=NUM_ROWS, embedding_dim=dim, feature_names=["user"]
        ),
        configs.EmbeddingBagConfig(
            name="goods",
            num_embeddings=NUM_ROWS,
            embedding_dim=dim,
            feature_names=["item", "genre"],
            pooling=configs.PoolingType.MEAN,
        ),
    ]
    return modules.EmbeddingBagCollection(tables)


def keyed_jagged(batch: Clicks, device: torch.device | str) -> Any:
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="needs TorchRec")
    sparse = batch.sparse.to(device)
    return jagged.KeyedJaggedTensor(
        keys=list(sparse.keys), values=sparse.values, offsets=sparse.offsets
    )


@EACH_MODEL
def test_equals_torchrecs(
    ours: Callable[..., nn.Module], sizes: dict[str, Any], device: torch.device
) -> None:
    dlrm = pytest.importorskip("torchrec.models.dlrm", reason="needs TorchRec")
    twin_class = {DLRM: dlrm.DLRM, DLRM_DCNv2: dlrm.DLRM_DCN}[ours]
    torch.manual_seed(0)
    batch = clicks(device)
    model = ours(collection(device, 4, 4), **sizes, dense_device=device)

    def theirs(dtype: torch.dtype) -> list[Tensor]:
        twin = twin_class(torchrec_collection(), **sizes).to(device, dtype)
        with torch.no_grad():
            for same, parameter in zip(
                parameters_in_order(twin), parameters_in_order(model), strict=True
            ):
                same.copy_(parameter)
        return results(twin, batch, keyed_jagged(batch, device), dtype)

    for which, actual in enumerate(results(model, batch, batch.sparse, torch.float32)):
        assert_follows(actual, lambda dtype, which=which: theirs(dtype)[which])


@EACH_MODEL
def test_takes_torchrecs_batches_and_tables(
    ours: Callable[..., nn.Module], sizes: dict[str, Any], device: torch.device
) -> None:
    batch = clicks(device)
    model = ours(collection(device, 4, 4), **sizes, dense_device=device)
    jagged = keyed_jagged(batch, device)
    assert_same_bits(model(batch.dense, jagged), model(batch.dense, batch.sparse))

    model.embedding_bag_collection = torchrec_collection().to(device)
    assert model(batch.dense, jagged).shape == (6, 1)


@EACH_MODEL
def test_an_empty_batch_has_no_logits_and_no_gradient(
    ours: Callable[..., nn.Module], sizes: dict[str, Any], device: torch.device
) -> None:
    model = ours(collection(device, 4, 4), **sizes, dense_device=device)
    batch = clicks(device, batch_size=0)
    logits = model(batch.dense, batch.sparse)
    assert logits.shape == (0, 1)
    logits.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@EACH_MODEL
def test_trains_under_autocast(
    ours: Callable[..., nn.Module], sizes: dict[str, Any], device: torch.device
) -> None:
    model = ours(collection(device, 4, 4), **sizes, dense_device=device)
    batch = clicks(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(batch.dense, batch.sparse)
    logits.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("ours", [WideAndDeep, DeepFM])
def test_models_with_a_linear_part_take_torchrecs_tables(
    ours: Callable[..., nn.Module], device: torch.device
) -> None:
    batch = clicks(device)
    torchrecs = torchrec_collection().to(device), torchrec_collection(1).to(device)
    model = ours(*torchrecs, layer_sizes=[5], dense_in_features=5, dense_device=device)
    twin = ours(
        *(collection(device, dim, dim) for dim in (4, 1)),
        layer_sizes=[5],
        dense_in_features=5,
        dense_device=device,
    )
    twin.load_state_dict(model.state_dict())
    jagged = keyed_jagged(batch, device)
    assert_follows(
        twin(batch.dense, batch.sparse),
        lambda dtype: model.to(dtype)(batch.dense.to(dtype), jagged),
    )


def test_tables_of_several_dims_suit_a_cross_network_only(device: torch.device) -> None:
    batch = clicks(device)
    model = DLRM_DCNv2(collection(device, 4, 2), **CROSS_SIZES, dense_device=device)
    assert model(batch.dense, batch.sparse).shape == (6, 1)
    with pytest.raises(
        ValueError, match=r"^embedding_bag_collection must have tables of one .*, got \[2, 4\]; "
    ):
        DLRM(collection("meta", 4, 2), **SIZES)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"^dense_arch_layer_sizes must end with the embedding_dim 4, got \[6\]$"
    ):
        DLRM(collection("meta", 4, 4), **SIZES | {"dense_arch_layer_sizes": [6]})
    with pytest.raises(
        TypeError, match=r"^embedding_bag_collection must be .*, got Linear, which has no "
    ):
        DLRM_DCNv2(nn.Linear(2, 2), **CROSS_SIZES)
    with pytest.raises(ValueError, match=r"^dense_in_features must be at least 1, got 0; DCNv2 "):
        DLRM_DCNv2(collection("meta", 4, 2), **CROSS_SIZES | {"dense_in_features": 0})
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=("f",))
    one_feature = EmbeddingBagCollection([table], device="meta")
    with pytest.raises(ValueError, match=r"^interaction must be CONCATENATION where one sparse f"):
        DLRM(one_feature, 0, [], [1])


def test_missing_dense_features_are_named(device: torch.device) -> None:
    model = DLRM_DCNv2(collection(device, 4, 2), **CROSS_SIZES, dense_device=device)
    with pytest.raises(ValueError, match=r"^dense_features must be \[B, 5\], got None$"):
        model(None, clicks(device).sparse)


def test_the_cross_network_s_input_is_not_concatenated() -> None:
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name="rows", num_embeddings=NUM_ROWS, embedding_dim=4, feature_names=KEYS
            )
        ]
    )
    batch, model = clicks("cpu"), DLRM_DCNv2(tables, **CROSS_SIZES)
    parts: list[Tensor] = []
    model.cross.register_forward_pre_hook(lambda _, given: parts.extend(given))
    results(model, batch, batch.sparse, torch.float32)
    dense, pooled = parts
    # The first columns are the dense part's, which nobody else has put there.
    assert pooled._base is not None
    assert_same_bits(pooled._base.flatten(1), torch.cat([dense, pooled], dim=1))
