"""Runs of all recipes that can be served, deployed and asked in this process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recipes.registry import RECIPES
from recipes.sequences.interactions import read
from recipes.serve import deploy_run
from recipes.serve import main as serve
from recipes.train import main, parse
from tests.support import made_data
from tests.support.served_lookups import options_over
from torchembed.models import CandidateScores, Impressions
from torchembed.serving.models import ModelRepository
from torchembed.stores import MemoryStore
from torchembed.training import CheckpointFolder, TrainingRun

pytest.importorskip("starlette")

CLICKS = ("--embedding-dim", "4", "--batch-size", "64", "--max-epochs", "2", "--seeds", "1", "2")
DTYPES = {"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}


def run_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Path:
    """Train in this process; the checkpoint that the last line names."""
    main([str(argument) for argument in arguments])
    return Path(
        json.loads(capsys.readouterr().out.splitlines()[-1][len("RESULT ") :])["checkpoint"]
    )


def answer_of(models: Path, name: str) -> dict[str, np.ndarray]:
    """The answer of the deployed model to the request beside it."""
    request = json.loads((models.parent / f"{name}.json").read_text())
    inputs = {
        form["name"]: np.array(form["data"], DTYPES[form["datatype"]]).reshape(form["shape"])
        for form in request["inputs"]
    }
    with ModelRepository(models, options_over(MemoryStore())) as repository:
        repository.load(name)
        return dict(repository.model(name).answer(inputs).outputs)


def loaded(model: nn.Module, checkpoint: Path) -> nn.Module:
    """``model`` with the weights of a checkpoint and of nothing else."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    CheckpointFolder(checkpoint).load(TrainingRun(model=model))
    return model.eval()


def test_what_is_served_is_the_newest_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_data.write_frappe(tmp_path)
    models, first, second = (tmp_path / name for name in ("models", "first", "second"))
    arguments = ["lr.frappe", "--data", tmp_path, "--output", first, *CLICKS[:-1]]
    (steps,) = CheckpointFolder(run_of(capsys, *arguments)).steps()
    shutil.copytree(first, second)  # another run of as many steps
    served = [first, first, second, second, first]
    versions = [deploy_run("lr.frappe", run, models).version for run in served]
    assert versions == [steps, steps, steps + 1, steps + 1, steps + 2]
    with ModelRepository(models, options_over(MemoryStore())) as repository:
        repository.load("lr.frappe")
        assert repository.versions("lr.frappe") == [str(steps + 2)]
    # Nothing says what was deployed.
    (tmp_path / "lr.frappe.deployed.json").unlink()
    assert deploy_run("lr.frappe", first, models).version == steps + 3
    # What is deployed in another dtype is another version.
    for _ in range(2):
        assert deploy_run("lr.frappe", first, models, torch.bfloat16).version == steps + 4
    answer = answer_of(models, "lr.frappe")["click"]
    assert not np.array_equal(answer, torch.tensor(answer).bfloat16().float())


@pytest.mark.parametrize(
    ("recipe", "write", "flags", "sigmoids"),
    [
        ("deepfm.frappe", made_data.write_frappe, ("--layer-sizes", "8"), {"click"}),
        ("ctr-ml1m", made_data.write_ml1m, ("--layer-sizes", "8"), {"click"}),
        ("mmoe", made_data.write_ml1m, ("--expert-layer-sizes", "4"), {"like"}),
    ],
)
def test_the_best_seed_of_a_run_answers(
    recipe: str,
    write: Callable[[Path], Path],
    flags: tuple[str, ...],
    sigmoids: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    run, models = tmp_path / "run", tmp_path / "models"
    arguments = [recipe, "--data", str(tmp_path), "--output", str(run), *CLICKS, *flags]
    best = run_of(capsys, *arguments)
    deployed = deploy_run(recipe, run, models)
    assert deploy_run(recipe, run, models) == deployed  # and is not deployed twice
    assert (deployed.name, [deployed.version]) == (recipe, CheckpointFolder(best).steps())
    make_served = RECIPES[recipe].served
    assert make_served is not None
    served = make_served(parse(arguments).config, run)
    with torch.no_grad():
        result: Any = loaded(served.load_model(), best)(*served.examples)
    expected: dict[str, Tensor] = result if isinstance(result, dict) else {"click": result}
    found = answer_of(models, recipe)
    assert found.keys() == expected.keys() | {"default_rows"}
    for name, output in expected.items():
        right = output.sigmoid() if name in sigmoids else output
        np.testing.assert_allclose(found[name].flatten(), right.flatten()[:2], atol=1e-6)


SEQUENCES = (
    *("--embedding-dim", "4", "--max-length", "12", "--batch-size", "4", "--epochs", "1"),
    *("--seeds", "1", "2"),
)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("sasrec", ("--num-negatives", "3")),
        ("din", ("--layer-sizes", "4", "--attention-sizes", "4")),
        ("two-tower", ("--layer-sizes", "4")),
    ],
)
def test_the_last_seed_of_a_sequence_model_answers(
    recipe: str, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_data.write_ml1m(tmp_path)
    run, models = tmp_path / "run", tmp_path / "models"
    arguments = [recipe, "--data", str(tmp_path), "--output", str(run), *SEQUENCES, *flags]
    last = run_of(capsys, *arguments)
    deployed = deploy_run(recipe, run, models)
    assert [deployed.version] == CheckpointFolder(last).steps()
    make_served = RECIPES[recipe].served
    assert make_served is not None
    model = make_served(parse(arguments).config, run).load_model()
    data = read(path)
    # What followed the histories of the first two users is the first candidate.
    bounds = [slice(int(end) - 13, int(end) - 1) for end in data.offsets[1:3]]
    targets = torch.stack([data.items[bound.stop] for bound in bounds])
    impressions = Impressions(
        torch.cat([data.items[bound] for bound in bounds]),
        torch.tensor([0, 12, 24]),
        torch.cat([targets.unsqueeze(1), torch.arange(9).expand(2, -1)], dim=1),
    )
    inner = model.model if isinstance(model, CandidateScores) else model
    loaded(inner, last)
    with torch.no_grad():
        result = model.eval()(impressions)
    expected = result if isinstance(result, dict) else {"click": result.sigmoid()}
    found = answer_of(models, recipe)
    assert found.keys() == expected.keys() | {"default_rows"}
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, atol=1e-6)


def test_hstu_by_the_times_of_ratings_is_refused(tmp_path: Path) -> None:
    made_data.write_ml1m(tmp_path)
    config = parse(["hstu", "--data", str(tmp_path)]).config
    make_served = RECIPES["hstu"].served
    assert make_served is not None
    with pytest.raises(ValueError, match="hstu must be on data without times to be served"):
        make_served(config, tmp_path / "run")


def test_a_run_that_came_to_no_evaluation_is_refused(tmp_path: Path) -> None:
    made_data.write_frappe(tmp_path)
    config = parse(["lr.frappe", "--data", str(tmp_path)]).config
    make_served = RECIPES["lr.frappe"].served
    assert make_served is not None
    with pytest.raises(FileNotFoundError, match="must have saved a checkpoint to be served"):
        make_served(config, tmp_path / "run")


def test_only_dlrm_is_trained_on_while_it_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve(["mmoe", "--live"])
    said = capsys.readouterr().err
    assert "--live must be left out for mmoe, since only a run of dlrm_dcnv2 can be" in said
