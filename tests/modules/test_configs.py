"""Configs of ours, and TorchRec's taken as they are."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.clicks import import_torchrec
from tests.support.tolerance import assert_same_bits
from torchembed import (
    Constant,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    InPlaceFunction,
    Pooling,
    Uniform,
)
from torchembed.modules.configs import as_config

TABLE: dict[str, Any] = {
    "name": "users",
    "num_embeddings": 100,
    "embedding_dim": 8,
    "feature_names": ["user"],
}


def theirs(**settings: Any) -> Any:
    return import_torchrec().EmbeddingBagConfig(**{**TABLE, **settings})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("FP32", torch.float32), ("FP16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_torchrecs_data_types(name: str, dtype: torch.dtype) -> None:
    data_type = import_torchrec().DataType[name]
    config = as_config(theirs(data_type=data_type), EmbeddingBagConfig)
    assert config.dtype == dtype
    module = EmbeddingBagCollection([theirs(data_type=data_type)])
    assert module.embedding_bags["users"].weight.dtype == dtype


@pytest.mark.parametrize("pooling", list(Pooling))
def test_torchrecs_poolings(pooling: Pooling) -> None:
    kind = import_torchrec().PoolingType
    config = as_config(theirs(pooling=kind[pooling.name]), EmbeddingBagConfig)
    assert isinstance(config, EmbeddingBagConfig)
    assert config.pooling is pooling
    with pytest.raises(
        ValueError, match=r'pooling of table users must be "sum" or "mean", got .none'
    ):
        as_config(theirs(pooling=kind.NONE), EmbeddingBagConfig)


def test_torchrecs_initial_ranges() -> None:
    # TorchRec's default is 1 / sqrt(rows) on both sides, as ours is.
    assert as_config(theirs(), EmbeddingBagConfig).initializer == Uniform(low=-0.1, high=0.1)
    config = as_config(theirs(weight_init_min=-3.0, weight_init_max=2.0), EmbeddingBagConfig)
    assert config.initializer == Uniform(low=-3.0, high=2.0)
    weight = EmbeddingBagCollection([theirs(weight_init_min=1.0, weight_init_max=2.0)]).state_dict()
    assert all(1 <= value <= 2 for value in weight["embedding_bags.users.weight"].flatten())


def fill(weight: Tensor) -> Tensor:
    return weight.fill_(3.0)


def test_torchrecs_initial_functions() -> None:
    assert as_config(theirs(init_fn=fill), EmbeddingBagConfig).initializer == InPlaceFunction(fill)
    module = EmbeddingBagCollection([theirs(init_fn=fill)])
    weight = module.embedding_bags["users"].weight
    assert (weight == 3).all()
    with torch.no_grad():
        weight.zero_()
    module.reset_parameters()
    assert (weight == 3).all()
    # torch.nn.init's uniform_ is between 0 and 1 where it is not told otherwise.
    partial = functools.partial(torch.nn.init.uniform_, b=5.0)
    assert isinstance(
        as_config(theirs(init_fn=partial), EmbeddingBagConfig).initializer, InPlaceFunction
    )


def test_a_torchrec_table_without_features_is_named_by_its_table() -> None:
    config = as_config(theirs(feature_names=[]), EmbeddingBagConfig)
    assert config.feature_names == ("users",)


def test_torchrecs_configs_are_not_changed() -> None:
    config = theirs(feature_names=[])
    EmbeddingBagCollection([config])
    assert config.feature_names == []


def test_our_configs_may_stand_beside_torchrecs() -> None:
    module = EmbeddingBagCollection(
        [theirs(), EmbeddingBagConfig(**{**TABLE, "name": "others", "feature_names": ["other"]})]
    )
    names = [config.name for config in module.embedding_bag_configs()]
    assert names == ["users", "others"]
    first, second = (parameter for parameter in module.parameters())
    assert not torch.equal(first, second)


def test_our_initializers() -> None:
    module = EmbeddingCollection([EmbeddingConfig(**TABLE, initializer=Constant(value=0.5))])
    assert_same_bits(module.embeddings["users"].weight, torch.full((100, 8), 0.5))


@pytest.mark.parametrize("pooling", ["mean", "MEAN", Pooling.MEAN])
def test_a_pooling_may_be_named(pooling: Any) -> None:
    assert EmbeddingBagConfig(**TABLE, pooling=pooling).pooling is Pooling.MEAN


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (
            ValueError,
            "num_embeddings of table users must be positive, got 0",
            {"num_embeddings": 0},
        ),
        (
            ValueError,
            "embedding_dim of table users must be positive, got -1",
            {"embedding_dim": -1},
        ),
        (ValueError, "feature_names of table users must name at least one", {"feature_names": []}),
        (
            TypeError,
            r"feature_names of table users must be a sequence of names, got the string 'user'",
            {"feature_names": "user"},
        ),
        (
            TypeError,
            r"feature_names of table users must be a sequence of names, got \[3\]",
            {"feature_names": [3]},
        ),
        (
            ValueError,
            r"feature_names of table users must all be different, got \['a', 'a'\]",
            {"feature_names": ["a", "a"]},
        ),
        (
            TypeError,
            "dtype of table users must be float32, float16 or bfloat16, got torch.float64",
            {"dtype": torch.float64},
        ),
        (ValueError, "name of a table must be a word without dots, .* got ''", {"name": ""}),
        (ValueError, "name of a table must be a word without dots, .* 'a.b'", {"name": "a.b"}),
        (ValueError, "name of a table must not be 'items', which is an attr", {"name": "items"}),
        (
            ValueError,
            'pooling of table users must be "sum" or "mean", got .max',
            {"pooling": "max"},
        ),
    ],
)
def test_errors_of_our_configs(
    error: type[Exception], message: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        EmbeddingBagConfig(**{**TABLE, **settings})


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("need_pos of table users is not supported; leave it out", {"need_pos": True}),
        ("use_virtual_table of table users is not supported", {"use_virtual_table": True}),
        ("num_embeddings of table users must be positive", {"num_embeddings": 0, "init_fn": fill}),
    ],
)
def test_errors_of_torchrecs_configs(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        as_config(theirs(**settings), EmbeddingBagConfig)


def test_errors_of_torchrecs_data_types() -> None:
    config = theirs(data_type=import_torchrec().DataType.INT8)
    with pytest.raises(
        ValueError, match="data_type of table users must be FP32, FP16 or BF16, got"
    ):
        as_config(config, EmbeddingBagConfig)


def test_configs_of_another_kind_are_refused() -> None:
    message = "tables must hold EmbeddingBagConfig or TorchRec's config of that name, got "
    with pytest.raises(TypeError, match=message + "str"):
        EmbeddingBagCollection(["users"])
    for kind in (EmbeddingConfig, import_torchrec().EmbeddingConfig):
        with pytest.raises(TypeError, match=message + "EmbeddingConfig"):
            EmbeddingBagCollection([kind(**TABLE)])
