"""Recipes of all models of clicks: their protocols, and whole runs that are tiny."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.ctr import made
from recipes.ctr.models import MODELS, MLPConfig
from recipes.ctr.run import build_model
from recipes.registry import RECIPES
from recipes.train import main, parse
from tests.support import made_data
from torchembed.data import ClickLogConfig
from torchembed.models import DLRMInteraction

LOG = ClickLogConfig(table_sizes=(40, 9, 5), hotness=(1, 3, 1), num_train=2000, num_held_out=2000)
SMALL = ("--embedding-dim", "4", "--batch-size", "128", "--max-epochs", "2", "--seeds", "1")
SMALL_MODELS = {
    "dcn": ("--num-cross-layers", "1"),
    "dlrm": ("--dense-layer-sizes", "5"),
    "xdeepfm": ("--cin-layer-sizes", "3", "2"),
    "autoint": ("--num-attention-layers", "1", "--attention-dim", "4"),
}


def result_of(
    capsys: pytest.CaptureFixture[str], recipe: str, output: Path, *arguments: str
) -> dict[str, Any]:
    model = recipe.split(".", maxsplit=1)[0]
    flags = [*SMALL, *SMALL_MODELS.get(model, ()), "--output", str(output), *arguments]
    if issubclass(MODELS[model], MLPConfig):
        flags += ["--layer-sizes", "8"]
    main([recipe, *flags])
    return json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_on_the_made_log(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dense features, and bags of several ids."""
    monkeypatch.setattr(made, "LOG", LOG)
    result = result_of(capsys, name, tmp_path / "out", "--learning-rate", "0.05")
    assert result["num_steps"] == 2 * -(-2000 // 128)
    assert 0.6 < result["test_auc"] < 1  # of 0.84 that a model can reach
    assert 0.8 < result["bayes_auc"] < 0.9
    assert (tmp_path / "out" / "seed-1" / "training.png").is_file()


@pytest.mark.parametrize(
    ("recipe", "write"),
    [
        ("dlrm.frappe", made_data.write_frappe),
        ("xdeepfm.ml1m", made_data.write_ml1m),
    ],
)
def test_models_train_on_data_sets(
    recipe: str, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    result = result_of(capsys, recipe, tmp_path / "out", "--data", str(tmp_path))
    assert 0 < result["test_logloss"] < 1


def test_every_model_has_a_recipe_for_each_data_set() -> None:
    for name, kind in MODELS.items():
        for recipe in (name, f"{name}.frappe", f"{name}.ml1m"):
            assert type(parse([recipe]).config) is kind
            assert RECIPES[recipe].summary.startswith(kind.title)
    for model, first in (("dcnv2.frappe", "ctr-frappe"), ("dcnv2.ml1m", "ctr-ml1m")):
        assert RECIPES[model] == RECIPES[first]


PROTOCOLS = {
    "lr": {"embedding_l2": 1e-5},
    "fm": {"embedding_l2": 5e-6},
    "dnn": {"embedding_l2": 0.05, "dropout": 0.2},
    "wide-and-deep": {"embedding_l2": 0.1, "dropout": 0.6},
    "deepfm": {"embedding_l2": 0.05, "dropout": 0.2},
    "dcn": {"embedding_l2": 0.05, "dropout": 0.2, "num_cross_layers": 3},
    "dcnv2": {"embedding_l2": 0.05, "dropout": 0.4, "num_cross_layers": 4},
    "dlrm": {
        "embedding_l2": 0.1,
        "dropout": 0.4,
        "interaction": DLRMInteraction.CONCATENATION,
    },
    "xdeepfm": {"embedding_l2": 0.1, "dropout": 0.2, "cin_layer_sizes": (64,)},
    "autoint": {"embedding_l2": 0.1, "dropout": 0.1, "num_attention_layers": 5},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_frappe_follow_the_benchmark(name: str) -> None:
    config = parse([f"{name}.frappe"]).config
    fields = dataclasses.asdict(config)
    common = {
        "embedding_dim": 10,
        "batch_size": 4096,
        "learning_rate": 1e-3,
        "max_grad_norm": 10.0,
        "lr_decay": 0.1,
        "patience": 2,
        "max_epochs": 100,
    }
    of_mlp = {"layer_sizes": (400, 400, 400), "batch_norm": True}
    expected = {**common, **(of_mlp if isinstance(config, MLPConfig) else {}), **PROTOCOLS[name]}
    assert {field: fields[field] for field in expected} == expected


NUM_IDS = (957, 4082, 7, 7, 2, 3, 2, 9, 80, 233)
"""Of Frappe_x1's fields."""


@pytest.mark.parametrize(
    ("name", "columns", "published"),
    [
        ("lr", 1, 5390),
        ("fm", 11, 59_280),
        ("wide-and-deep", 11, 423_280),
        ("deepfm", 11, 423_280),
        ("dlrm", 10, 417_891),
    ],
)
def test_models_have_as_many_parameters_as_published(
    name: str, columns: int, published: int
) -> None:
    """FuxiCTR's tables have seven rows more."""
    sizes = {f"field_{number}": num_ids for number, num_ids in enumerate(NUM_IDS)}
    model = build_model(parse([f"{name}.frappe"]).config, sizes, 1, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == published - 7 * columns


def test_the_made_log_takes_no_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--data must be left out for the made click log, got /"):
        parse(["deepfm", "--data", str(tmp_path)])


def test_flags_of_another_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["deepfm", "--num-cross-layers", "3"])
    assert "num-cross-layers" in capsys.readouterr().err
