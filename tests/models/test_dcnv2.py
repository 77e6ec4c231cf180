"""``DCNv2`` against the same network put together from torch's layers."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.model_batches import clicks, collection
from tests.support.tolerance import assert_follows
from torchembed.models import DCNv2, DCNv2Structure


def model_of(
    device: torch.device,
    structure: DCNv2Structure = DCNv2Structure.PARALLEL,
    *,
    low_rank: int | None = None,
    num_dense: int = 0,
    batch_norm: bool = False,
) -> DCNv2:
    model = DCNv2(
        collection(device, 4, 3),
        num_cross_layers=2,
        layer_sizes=[6, 5],
        structure=structure,
        low_rank=low_rank,
        batch_norm=batch_norm,
        dense_in_features=num_dense,
        dense_device=device,
    )
    with torch.no_grad():
        for bias in model.cross.bias:
            bias.normal_()
    return model


def formula(
    model: DCNv2, structure: DCNv2Structure, features: Tensor, values: dict[str, Tensor]
) -> Tensor:
    """The logits of ``features [B, N]``, by the values of the model's parameters."""
    crossed = features
    for layer in range(2):
        if "cross.weight.0" in values:
            product = crossed @ values[f"cross.weight.{layer}"].T
        else:
            product = crossed @ values[f"cross.v.{layer}"].T @ values[f"cross.u.{layer}"].T
        crossed = features * (product + values[f"cross.bias.{layer}"]) + crossed
    hidden = crossed if structure is DCNv2Structure.STACKED else features
    for index, layer in enumerate(model.mlp):
        if isinstance(layer, nn.Linear):
            hidden = hidden @ values[f"mlp.{index}.weight"].T + values[f"mlp.{index}.bias"]
            hidden = hidden.relu()
    if structure is DCNv2Structure.PARALLEL:
        hidden = torch.cat([crossed, hidden], dim=1)
    return hidden @ values["logit.weight"].T + values["logit.bias"]


@pytest.mark.parametrize("num_dense", [0, 5])
@pytest.mark.parametrize("low_rank", [None, 3])
@pytest.mark.parametrize("structure", list(DCNv2Structure))
def test_follows_the_formula(
    structure: DCNv2Structure, low_rank: int | None, num_dense: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = model_of(device, structure, low_rank=low_rank, num_dense=num_dense)
    batch = clicks(device, num_dense=num_dense)
    pooled = model.embedding_bag_collection(batch.sparse).values().detach()
    features = torch.cat([batch.dense, pooled], dim=1)
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith("embedding_bag_collection")
    }

    def expected(dtype: torch.dtype) -> list[Tensor]:
        leaves = {
            name: parameter.detach().to(dtype).requires_grad_()
            for name, parameter in parameters.items()
        }
        logits = formula(model, structure, features.to(dtype), leaves)
        grad = batch.grad.to(dtype)
        return [logits, *torch.autograd.grad(logits, list(leaves.values()), grad)]

    logits = model(batch.dense, batch.sparse)
    actual = [logits, *torch.autograd.grad(logits, list(parameters.values()), batch.grad)]
    for which, result in enumerate(actual):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])


def test_dense_features_are_not_asked_for_where_there_are_none(device: torch.device) -> None:
    batch = clicks(device)
    model = model_of(device)
    assert torch.equal(model(None, batch.sparse), model(batch.dense, batch.sparse))


@pytest.mark.parametrize("structure", list(DCNv2Structure))
@pytest.mark.parametrize("batch_size", [0, 1])
def test_short_last_batches_train_with_batch_norm(
    batch_size: int, structure: DCNv2Structure, device: torch.device
) -> None:
    model = model_of(device, structure, batch_norm=True)
    batch = clicks(device, batch_size=batch_size)
    model(None, batch.sparse).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


def test_compiles_but_for_its_tables(device: torch.device) -> None:
    class Pooled(nn.Module):
        """Stands where the tables are, for what is compiled."""

        def embedding_bag_configs(self) -> list:
            return tables.embedding_bag_configs()

        def forward(self, pooled: Tensor) -> "Pooled":
            self.pooled = pooled
            return self

        def values(self) -> Tensor:
            return self.pooled

    tables = collection(device, 4, 3)
    model = DCNv2(Pooled(), num_cross_layers=2, layer_sizes=[6], dense_device=device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch_size in (4, 7):
        pooled = tables(clicks(device, batch_size=batch_size).sparse).values().detach()
        assert torch.equal(compiled(None, pooled), model(None, pooled))


def test_missing_dense_features_are_named(device: torch.device) -> None:
    model = model_of(device, num_dense=5)
    with pytest.raises(ValueError, match=r"^dense_features must be \[B, 5\], got None$"):
        model(None, clicks(device).sparse)
