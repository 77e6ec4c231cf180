"""``install()`` puts our pipeline in the place of TorchRec's, and leaves the classes of others."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.torchrec_cases import ADAGRAD, MIXED, SETTINGS, log_lines, optimizer_class
from tests.support.torchrec_pipelines import batches

NUM_STEPS = 8


def make(whose: str, **arguments: Any) -> Any:
    from tests.support.torchrec_training import make_run

    return make_run(
        whose,
        torch.device("cpu"),
        MIXED["placements"],
        optimizer_class(ADAGRAD),
        SETTINGS[ADAGRAD],
        for_pipeline=True,
        **arguments,
    )


@contextlib.contextmanager
def installed(**settings: bool) -> Iterator[None]:
    from torchembed.integrations.torchrec import install, uninstall

    install(**settings)
    try:
        yield
    finally:
        uninstall()


def losses_of(pipeline: Any, stream: Iterator[Any], count: int) -> list[float]:
    return [float(pipeline.progress(stream)[0]) for _ in range(count)]


def kinds() -> dict[str, tuple[str, bool]]:
    """The module of the class of what is made by each name and in each way, and if it is one of
    TorchRec's pipelines."""
    import torchrec.distributed as package
    from torchrec.distributed import train_pipeline
    from torchrec.distributed.train_pipeline import TrainPipelineContext, train_pipelines

    theirs = package.TrainPipelineSparseDist
    run = make("ours")
    three = run.model, run.optimizer, run.device
    context: Any = TrainPipelineContext
    found: dict[str, Any] = {"before": theirs(*three)}
    with installed():
        from torchembed.integrations.torchrec import install

        install()
        found["package"] = package.TrainPipelineSparseDist(*three)
        found["subpackage"] = train_pipeline.TrainPipelineSparseDist(*three)
        found["module"] = train_pipelines.TrainPipelineSparseDist(*three)
        found["name from before"] = theirs(*three, True, False, context, False, None, 1, True)
        found["of types"] = theirs[Any, Any](
            model=run.model, optimizer=run.optimizer, device=three[2]
        )
        found["subclass"] = type("Mine", (theirs,), {"__module__": __name__})(*three)
        install(pipeline=False)
        found["left"] = theirs(*three)
    found["after"] = theirs(*three, execute_all_batches=False)
    with installed(pipeline=False):
        found["never"] = theirs(*three)
    return {name: (type(made).__module__, isinstance(made, theirs)) for name, made in found.items()}


def subclass(*, is_installed: bool) -> tuple[list[str], list[float], int]:
    """A user's subclass, which counts its steps: the log's lines, losses and count."""
    from torchrec.distributed import TrainPipelineSparseDist

    class Counting(TrainPipelineSparseDist[Any, Any]):
        count = 0

        def _optimizer_step(self) -> None:
            type(self).count += 1
            super()._optimizer_step()

    run = make("ours")
    stream = batches(run, NUM_STEPS, is_fixed=True)
    with installed() if is_installed else contextlib.nullcontext(), log_lines() as lines:
        pipeline, _ = (Counting(run.model, run.optimizer, run.device) for _ in range(2))
        assert isinstance(pipeline, TrainPipelineSparseDist)
        losses = losses_of(pipeline, stream, NUM_STEPS)
    return lines, losses, Counting.count


def others() -> list[str]:
    """The log of TorchRec's own other pipelines."""
    from torchrec.distributed import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist
    from torchrec.distributed.train_pipeline import TrainPipelineBase

    run = make("ours")
    with installed(), log_lines() as lines:
        for kind in (TrainPipelineBase, EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist):
            kind(run.model, run.optimizer, run.device)
    return lines


def closed_in_time() -> list[str]:
    """The events in turn where a script destroys process groups and ends, and closes no
    pipeline."""
    from torch.distributed import distributed_c10d
    from torchrec.distributed import TrainPipelineSparseDist

    from torchembed.integrations.torchrec.pipeline import replaced_pipeline

    happened: list[str] = []
    world, other = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(world, dist.ProcessGroup) and isinstance(other, dist.ProcessGroup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaced_pipeline, "_destroy", lambda group: happened.append("destroyed"))
        run = make("ours")
        with installed():
            pipeline: Any = TrainPipelineSparseDist(run.model, run.optimizer, run.device)
            losses_of(pipeline, batches(run, 4, is_fixed=True), 2)
            patch.setattr(pipeline._steps, "close", lambda: happened.append("closed"))
            dist.destroy_process_group(other)
            dist.destroy_process_group()
            distributed_c10d.destroy_process_group(world)
            # Of a process that ends, as after an error: without waiting for other ranks.
            patch.setattr(
                pipeline._steps, "exit", lambda *error: happened.append(error[0].__name__)
            )
            replaced_pipeline._leave()
    return happened


def everything_on_the_cpu() -> dict[str, Any]:
    """On a rank."""
    found: dict[str, Any] = {"kinds": kinds(), "others": others(), "closed": closed_in_time()}
    found["subclass"] = [subclass(is_installed=is_installed) for is_installed in (False, True)]
    return found


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["replaced_pipeline"] for answer in cpu_answers]


def test_ours_is_made_by_every_name_while_installed(ranks: list[dict[str, Any]]) -> None:
    ours = "torchembed.integrations.torchrec.pipeline.train_pipeline", True
    theirs = "torchrec.distributed.train_pipeline.train_pipelines", True
    names = "package", "subpackage", "module", "name from before", "of types"
    expected = dict.fromkeys(("before", "left", "after", "never"), theirs)
    expected |= dict.fromkeys(names, ours) | {"subclass": (__name__, True)}
    for rank in ranks:
        assert rank["kinds"] == expected


def test_subclasses_are_torchrecs_and_one_line_says_so(ranks: list[dict[str, Any]]) -> None:
    tail = (
        " trains as TorchRec has it, since torchembed's pipeline takes the place of "
        "TrainPipelineSparseDist itself and of no other class"
    )
    for number, rank in enumerate(ranks):
        before, (lines, losses, count) = rank["subclass"]
        assert before == ([], losses, NUM_STEPS) and count == NUM_STEPS
        assert lines == ([f"Counting{tail}"] if number == 0 else [])
        named = "TrainPipelineBase", "PrefetchTrainPipelineSparseDist"
        assert rank["others"] == ([f"{name}{tail}" for name in named] if number == 0 else [])


def test_pipelines_are_closed_before_the_process_group_is_destroyed(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["closed"] == ["destroyed", *["closed", "destroyed"] * 2, "SystemExit"]
