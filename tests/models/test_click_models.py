"""Models of clicks against their papers' formulas, with every table's and parameter's gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.model_batches import Clicks, clicks, collection
from tests.support.tolerance import assert_follows
from torchembed.models import (
    DCN,
    DLRM,
    DNN,
    AutoInt,
    DeepFM,
    DLRMInteraction,
    FactorizationMachine,
    LogisticRegression,
    WideAndDeep,
    XDeepFM,
)

Values = dict[str, Tensor]
Maker = Callable[..., nn.Module]
DIM = 4


def logistic_regression(device: torch.device | str, **arguments: Any) -> nn.Module:
    return LogisticRegression(collection(device, 1, 1), dense_device=device, **arguments)


def factorization_machine(device: torch.device | str, **arguments: Any) -> nn.Module:
    collections = collection(device, DIM, DIM), collection(device, 1, 1)
    return FactorizationMachine(*collections, dense_device=device, **arguments)


def dnn(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5]} | arguments
    return DNN(collection(device, DIM, 3), dense_device=device, **given)


def wide_and_deep(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5]} | arguments
    collections = collection(device, DIM, 3), collection(device, 1, 1)
    return WideAndDeep(*collections, dense_device=device, **given)


def deepfm(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5]} | arguments
    collections = collection(device, DIM, DIM), collection(device, 1, 1)
    return DeepFM(*collections, dense_device=device, **given)


def dcn(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5], "num_cross_layers": 3} | arguments
    return DCN(collection(device, DIM, 3), dense_device=device, **given)


def xdeepfm(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5], "cin_layer_sizes": [7, 2]} | arguments
    collections = collection(device, DIM, DIM), collection(device, 1, 1)
    return XDeepFM(*collections, dense_device=device, **given)


def autoint(device: torch.device | str, **arguments: Any) -> nn.Module:
    given = {"layer_sizes": [6, 5], "num_attention_layers": 2, "attention_dim": 6, "num_heads": 2}
    return AutoInt(collection(device, DIM, DIM), dense_device=device, **given | arguments)


def dlrm(
    device: torch.device | str,
    interaction: DLRMInteraction = DLRMInteraction.DOT,
    dense_in_features: int = 0,
    layer_sizes: tuple[int, ...] = (6, 5),
    **arguments: Any,
) -> nn.Module:
    dense_arch = [7, DIM] if dense_in_features else []
    return DLRM(
        collection(device, DIM, DIM),
        dense_in_features,
        dense_arch,
        [*layer_sizes, 1],
        device,
        interaction=interaction,
        **arguments,
    )


def dlrm_of_concatenation(device: torch.device | str, **arguments: Any) -> nn.Module:
    return dlrm(device, DLRMInteraction.CONCATENATION, **arguments)


def pooled(values: Values, prefix: str, batch: Clicks) -> Tensor:
    """Sums of users, means of items and genres, ``[B, 3, D]`` where all are of one width."""
    offsets, size = batch.sparse.offsets, batch.sparse.batch_size
    assert offsets is not None
    found = []
    for number, table in enumerate(("users", "goods", "goods")):
        weight = values[f"{prefix}embedding_bags.{table}.weight"]
        starts = offsets[number * size : (number + 1) * size + 1]
        ids = batch.sparse.values[starts[0] : starts[-1]]
        rows, lengths = weight[ids], starts.diff()
        bag = torch.repeat_interleave(torch.arange(size, device=ids.device), lengths)
        sums = torch.zeros(size, weight.shape[1], dtype=weight.dtype, device=ids.device)
        sums = sums.index_add(0, bag, rows)
        divisors = lengths.clamp(min=1) if table == "goods" else torch.ones_like(lengths)
        found.append(sums / divisors.unsqueeze(1).to(weight.dtype))
    return torch.cat(found, dim=1)


def linear(values: Values, prefix: str, batch: Clicks, dense: Tensor) -> Tensor:
    logit = pooled(values, f"{prefix}linear_collection.", batch).sum(1, keepdim=True)
    logit = logit + values[f"{prefix}bias"]
    return logit + dense @ values[f"{prefix}weight"] if f"{prefix}weight" in values else logit


def layers(values: Values, prefix: str, x: Tensor, *, ends_linear: bool = False) -> Tensor:
    """An MLP by its parameters, a rectifier after each layer."""
    indices = sorted({int(n.split(".")[-2]) for n in values if n.startswith(f"{prefix}.")})
    for index in indices:
        x = x @ values[f"{prefix}.{index}.weight"].T + values[f"{prefix}.{index}.bias"]
        if not (ends_linear and index == indices[-1]):
            x = x.relu()
    return x


def pairs(vectors: Tensor) -> list[Tensor]:
    """The dot product ``[B, 1]`` of each pair of ``vectors [B, F, D]``."""
    indices = itertools.combinations(range(vectors.shape[1]), 2)
    return [(vectors[:, i] * vectors[:, j]).sum(1, keepdim=True) for i, j in indices]


def logits_of_logistic_regression(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    return linear(values, "", batch, dense)


def embedded(values: Values, batch: Clicks) -> Tensor:
    return pooled(values, "embedding_bag_collection.", batch)


def logits_of_factorization_machine(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    of_pairs = sum(pairs(embedded(values, batch).unflatten(1, (3, DIM))))
    return linear(values, "linear.", batch, dense) + of_pairs


def deep(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    return layers(values, "mlp", torch.cat([dense, embedded(values, batch)], dim=1))


def logits_of_dnn(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    return deep(values, batch, dense) @ values["logit.weight"].T + values["logit.bias"]


def logits_of_wide_and_deep(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    of_deep = deep(values, batch, dense) @ values["logit.weight"].T
    return linear(values, "linear.", batch, dense) + of_deep


def logits_of_deepfm(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    of_deep = deep(values, batch, dense) @ values["logit.weight"].T
    return logits_of_factorization_machine(values, batch, dense) + of_deep


def logits_of_dcn(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    first = torch.cat([dense, embedded(values, batch)], dim=1)
    x = first
    for layer in range(3):
        scalar = (x * values[f"cross.weight.{layer}"]).sum(1, keepdim=True)
        x = first * scalar + values[f"cross.bias.{layer}"] + x
    last = torch.cat([x, deep(values, batch, dense)], dim=1)
    return last @ values["logit.weight"].T + values["logit.bias"]


def logits_of_xdeepfm(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    first = embedded(values, batch).unflatten(1, (3, DIM))
    x, sums = first, []
    for layer, size in enumerate((7, 2)):
        weight = values[f"cin.layers.{layer}.weight"].unflatten(1, (x.shape[1], 3))
        x = torch.einsum("hij,bid,bjd->bhd", weight, x, first)
        assert x.shape[1] == size
        sums.append(x.sum(2))
    last = torch.cat([*sums, deep(values, batch, dense)], dim=1)
    return linear(values, "linear.", batch, dense) + last @ values["logit.weight"].T


def logits_of_autoint(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    x = embedded(values, batch).unflatten(1, (3, DIM))
    for layer in range(2):
        q, k, v, residual = (x @ w.T for w in values[f"attention.{layer}.projections"])
        heads = []
        for head in (slice(0, 3), slice(3, 6)):
            scores = torch.einsum("bid,bjd->bij", q[..., head], k[..., head]) / 3**0.5
            heads.append(torch.einsum("bij,bjd->bid", scores.softmax(2), v[..., head]))
        x = (torch.cat(heads, dim=2) + residual).relu()
    last = torch.cat([x.flatten(1), deep(values, batch, dense)], dim=1)
    return last @ values["logit.weight"].T + values["logit.bias"]


def vectors_of_dlrm(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    vectors = embedded(values, batch).unflatten(1, (3, DIM))
    if not dense.shape[1]:
        return vectors
    return torch.cat([layers(values, "dense_arch", dense).unsqueeze(1), vectors], dim=1)


def logits_of_dlrm(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    vectors = vectors_of_dlrm(values, batch, dense)
    of_dense = [vectors[:, 0]] if dense.shape[1] else []
    x = torch.cat([*of_dense, *pairs(vectors)], dim=1)
    return layers(values, "over_arch", x, ends_linear=True)


def logits_of_dlrm_of_concatenation(values: Values, batch: Clicks, dense: Tensor) -> Tensor:
    x = vectors_of_dlrm(values, batch, dense).flatten(1)
    return layers(values, "over_arch", x, ends_linear=True)


FORMULAS: dict[Maker, Callable[[Values, Clicks, Tensor], Tensor]] = {
    logistic_regression: logits_of_logistic_regression,
    factorization_machine: logits_of_factorization_machine,
    dnn: logits_of_dnn,
    wide_and_deep: logits_of_wide_and_deep,
    deepfm: logits_of_deepfm,
    dcn: logits_of_dcn,
    xdeepfm: logits_of_xdeepfm,
    autoint: logits_of_autoint,
    dlrm: logits_of_dlrm,
    dlrm_of_concatenation: logits_of_dlrm_of_concatenation,
}
EACH = pytest.mark.parametrize("make", FORMULAS)
DEEP = [make for make in FORMULAS if make not in (logistic_regression, factorization_machine)]


@pytest.mark.parametrize("num_dense", [0, 5])
@EACH
def test_follows_the_formula(make: Maker, num_dense: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = make(device, dense_in_features=num_dense)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin with zeros
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    batch = clicks(device, num_dense=num_dense)
    parameters = dict(model.named_parameters())

    def expected(dtype: torch.dtype) -> list[Tensor]:
        values = {n: p.detach().to(dtype).requires_grad_() for n, p in parameters.items()}
        dense = batch.dense.detach().to(dtype).requires_grad_()
        logits = FORMULAS[make](values, batch, dense)
        leaves = [*([dense] if num_dense else []), *values.values()]
        return [logits, *torch.autograd.grad(logits, leaves, batch.grad.to(dtype))]

    dense = batch.dense.detach().requires_grad_()
    logits = model(dense, batch.sparse)
    assert logits.shape == (6, 1)
    leaves = [*([dense] if num_dense else []), *parameters.values()]
    actual = [logits, *torch.autograd.grad(logits, leaves, batch.grad)]
    for which, result in enumerate(actual):
        assert_follows(result, lambda dtype, which=which: expected(dtype)[which])


@pytest.mark.parametrize("make", DEEP)
def test_short_last_batches_train_with_batch_norm_and_dropout(
    make: Maker, device: torch.device
) -> None:
    model = make(device, batch_norm=True, dropout=0.5)
    for batch_size in (0, 1):
        batch = clicks(device, batch_size=batch_size)
        logits = model(None, batch.sparse)
        assert logits.shape == (batch_size, 1)
        logits.sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("make", DEEP)
def test_dropout_and_batch_norm_are_of_training_alone(make: Maker, device: torch.device) -> None:
    batch = clicks(device)
    model = make(device, dropout=0.9, batch_norm=True)
    assert any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
    torch.manual_seed(0)
    assert not torch.equal(model(None, batch.sparse), model(None, batch.sparse))
    model.eval()
    assert torch.equal(model(None, batch.sparse), model(None, batch.sparse))


@EACH
def test_trains_under_autocast(make: Maker, device: torch.device) -> None:
    model = make(device, dense_in_features=5)
    batch = clicks(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = F.binary_cross_entropy_with_logits(
            model(batch.dense, batch.sparse).float(), batch.grad.sigmoid()
        )
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all()


@EACH
def test_dense_features_are_asked_for_where_there_are_some(
    make: Maker, device: torch.device
) -> None:
    batch = clicks(device)
    model = make(device)
    assert torch.equal(model(None, batch.sparse), model(batch.dense, batch.sparse))
    with pytest.raises(ValueError, match=r"^dense_features must be \[B, 5\], got None$"):
        make(device, dense_in_features=5)(None, batch.sparse)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LogisticRegression(collection("meta", 1, 4)),
            r"linear_collection must have tables of embedding_dim 1, a weight .*, got \[1, 4\]$",
        ),
        (
            lambda: FactorizationMachine(collection("meta", 4, 2), collection("meta", 1, 1)),
            r"embedding_bag_collection must have tables of one embedding_dim, got \[2, 4\]; ",
        ),
        (lambda: dnn("meta", layer_sizes=[]), r"layer_sizes must hold one width or more"),
        (lambda: xdeepfm("meta", cin_layer_sizes=[]), r"layer_sizes must hold one number or more"),
        (
            lambda: autoint("meta", attention_dim=5),
            r"attention_dim must be a multiple of num_heads, got 5 and 2$",
        ),
        (
            lambda: autoint("meta", num_attention_layers=0),
            r"num_attention_layers must be at least 1, got 0$",
        ),
        (
            lambda: DLRM(collection("meta", 4, 4), 0, [6, 4], [1]),
            r"dense_arch_layer_sizes must be none where dense_in_features is 0, got \[6, 4\]$",
        ),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
