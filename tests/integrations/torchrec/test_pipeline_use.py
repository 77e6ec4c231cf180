"""Use of our pipeline between its steps, and what it leaves to TorchRec's."""

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.tolerance import assert_within_drift
from tests.support.torchrec_cases import (
    ADAGRAD,
    ADAM,
    MIXED,
    SETTINGS,
    log_lines,
    optimizer_class,
)
from tests.support.torchrec_pipelines import batches, make_pipeline

CPU = torch.device("cpu")


def make(whose: str, optimizer: str = ADAGRAD, **arguments: Any) -> Any:
    from tests.support.torchrec_training import make_run

    placements = arguments.pop("placements", MIXED["placements"])
    settings = SETTINGS[optimizer]
    torch_class = optimizer_class(optimizer)
    return make_run(whose, CPU, placements, torch_class, settings, for_pipeline=True, **arguments)


def losses_of(pipeline: Any, stream: Iterator[Any], count: int) -> list[float]:
    return [float(pipeline.progress(stream)[0]) for _ in range(count)]


def states_of(run: Any) -> list[float]:
    """The sum of what this rank holds of each state of the tables' optimizers."""
    state = run.model.fused_optimizer.state_dict()["state"]
    sums = []
    for name in sorted(state):
        for _, value in sorted(state[name].items()):
            shards = value.local_shards() if hasattr(value, "local_shards") else []
            sums += [float(shard.tensor.abs().sum()) for shard in shards]
    assert sums
    return sums


def evaluated_between(whose: str, **arguments: Any) -> list[float]:
    """Losses of steps, with the model evaluated between them in both ways, and saved and loaded."""
    run = make(whose, **arguments)
    pipeline, stream = make_pipeline(whose, run), batches(run, 12, is_fixed=True)
    found = losses_of(pipeline, stream, 2)
    run.model.eval()
    with torch.no_grad():
        found += [float(pipeline.detach()(next(batches(run, 1, is_fixed=False, first=50)))[0])]
        found += losses_of(pipeline, stream, 2)
    run.model.train()
    found += losses_of(pipeline, stream, 2)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    found += states_of(run)
    found += losses_of(pipeline, stream, 3)
    if whose == "ours":
        pipeline.close()  # it goes on all the same
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    found += losses_of(pipeline, stream, 3) + states_of(run)
    return found


def two_iterators(whose: str, **arguments: Any) -> list[float]:
    run = make(whose, **arguments)
    pipeline = make_pipeline(whose, run)
    found = losses_of(pipeline, batches(run, 5, is_fixed=True), 5)
    found += losses_of(pipeline, batches(run, 4, is_fixed=False, first=5), 4)
    return found


def left_early() -> tuple[int, list[int]]:
    """How many batches of an iterator were read, and of which each step was."""
    run = make("ours")
    pipeline = make_pipeline("ours", run)
    first, second = (
        [dataclasses.replace(b, labels=torch.full_like(b.labels, number)) for b in stream]
        for number, stream in enumerate(batches(run, 9, is_fixed=True) for _ in range(2))
    )
    left, then = iter(first), iter(second)
    steps = [int(pipeline.progress(left)[2][0]) for _ in range(3)]
    while True:
        try:
            steps.append(int(pipeline.progress(then)[2][0]))
        except StopIteration:
            return len(first) - len(list(left)), steps


def all_but_the_last(whose: str) -> int:
    run = make(whose)
    pipeline = make_pipeline(whose, run, execute_all_batches=False)
    stream = batches(run, 6, is_fixed=False)
    for count in itertools.count():
        try:
            pipeline.progress(stream)
        except StopIteration:
            return count
    raise AssertionError


def bad_ids(whose: str, **arguments: Any) -> tuple[list[float], list[str]]:
    run = make(whose, placements=["table_wise"], **arguments)
    pipeline = make_pipeline(whose, run)
    given = list(batches(run, 4, is_fixed=True))
    # Of table c, whose ids are the last.
    given[1].sparse_features.values()[-3:] = torch.tensor([1000, -2, -3])
    with log_lines() as lines:
        losses = losses_of(pipeline, iter(given), 4)
        if whose == "ours":
            pipeline.close()
    return losses, lines


def spare_ids() -> tuple[list[int], int]:
    """Rows of ids of which the last two are in no bag and in no table, and how many are bad."""
    from torchembed.core.features import SparseFeatures

    (collection,) = make_pipeline("ours", make("ours"))._steps._model.views
    checked = collection._checked(
        SparseFeatures(
            keys=tuple(collection._feature_slots.names),
            values=torch.tensor([0, 1, 2, -9, 4, -5, 5000]),
            offsets=torch.arange(6),
            batch_size=1,
        )
    )
    return checked.values.tolist(), collection.take_num_bad()


def fatal_ids() -> str:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    run = make("ours", fused_params={"bounds_check_mode": BoundsCheckMode.FATAL})
    pipeline = make_pipeline("ours", run)
    given = list(batches(run, 2, is_fixed=True))
    given[0].sparse_features.values()[-1] = 1000
    return error_of(lambda: pipeline.progress(iter(given)))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def failing_reads() -> tuple[list[str], list[str]]:
    """Every rank fails to read its third batch, or the second rank alone does."""
    run = make("ours")

    def broken(number: int) -> Iterator[Any]:
        yield from batches(run, number, is_fixed=True)
        raise OSError("no such file")

    found = []
    for fails in (True, dist.get_rank() == 1):
        pipeline = make_pipeline("ours", run)
        stream = broken(2) if fails else batches(run, 5, is_fixed=True)
        found.append([error_of(lambda: pipeline.progress(stream)) for _ in range(3)])  # noqa: B023
    return found[0], found[1]


class FailsAtFirst:
    """An iterator that goes on after an error."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.has_failed = batches, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise OSError("not there yet")
        return next(self.batches)


def failing_at_first() -> list[str]:
    run = make("ours")
    pipeline, stream = make_pipeline("ours", run), FailsAtFirst(batches(run, 2, is_fixed=True))
    return [error_of(lambda: pipeline.progress(stream)) for _ in range(4)]


def unequal_counts() -> str:
    run = make("ours")
    pipeline = make_pipeline("ours", run)
    stream = batches(run, 2 + dist.get_rank(), is_fixed=True)
    losses_of(pipeline, stream, 2)
    return error_of(lambda: pipeline.progress(stream))


def without_data_parallel(whose: str, **arguments: Any) -> list[float]:
    run = make(whose, init_data_parallel=False, **arguments)
    pipeline = make_pipeline(whose, run)
    return losses_of(pipeline, batches(run, 6, is_fixed=True), 6)


def four_steps(**arguments: Any) -> list[float]:
    """Losses of theirs, in the steps of :func:`what_falls_back`."""
    run = make("theirs", **arguments)
    return losses_of(make_pipeline("theirs", run), batches(run, 4, is_fixed=True), 4)


def what_falls_back() -> dict[str, tuple[list[str], list[float]]]:
    """For each case the log's lines, and the losses."""
    from torchrec.streamable import Pipelineable

    class Opaque(Pipelineable):
        def __init__(self, batch: Any) -> None:
            self.dense_features, self.labels = batch.dense_features, batch.labels
            self.sparse_features = batch.sparse_features
            self.source = object()

        def to(self, device: torch.device, non_blocking: bool = False) -> "Opaque":
            return self

        def record_stream(self, stream: Any) -> None: ...

    from torchrec.modules.embedding_configs import PoolingType

    hooked, settings = make("ours"), make("ours")
    next(iter(hooked.model.module.over.parameters())).register_hook(lambda grad: grad)
    cases: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "nothing": (make("ours"), {"pipeline_postproc": True, "apply_jit": False}, None),
        "theirs": (make("theirs"), {}, None),
        "settings": (settings, {"custom_model_fwd": settings.model.forward}, None),
        "hooks": (hooked, {}, None),
        "opaque": (make("ours"), {}, Opaque),
        "means": (make("ours", pooling=PoolingType.MEAN), {}, None),
        "adam": (make("ours", ADAM), {}, None),
    }
    found = {}
    for name, (run, arguments, wraps) in cases.items():
        stream: Any = batches(run, 4, is_fixed=True)
        if wraps is not None:
            stream = map(wraps, stream)
        with log_lines() as lines:
            pipeline = make_pipeline("ours", run, **arguments)
            found[name] = lines, losses_of(pipeline, stream, 4)
    return found


def wires() -> list[Any]:
    """Several quantized communications in our terms."""
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.distributed.types import CommOp

    from torchembed.integrations.torchrec.trained_model.wire_precision import wire_precision

    def registry(forward: CommType, backward: CommType) -> Any:
        settings = QCommsConfig(forward_precision=forward, backward_precision=backward)
        return get_qcomm_codecs_registry(settings, device=torch.device("cuda"))

    half = registry(CommType.FP16, CommType.FP16)
    mixed = registry(CommType.FP32, CommType.FP16)
    name = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name
    registries = [
        None,
        registry(CommType.FP16, CommType.BF16),
        mixed,
        {name: registry(CommType.FP8, CommType.BF16)[name]},
        {name: registry(CommType.INT8, CommType.FP32)[name]},
        {**half, name: mixed[name]},
    ]
    found = map(wire_precision, registries)
    # Plain, since the process that asks imports no TorchRec.
    return [wire if isinstance(wire, str) else (wire.forward, wire.backward) for wire in found]


def pushing_on_the_cpu() -> str:
    from torchembed.sharding.wire import WireTransport

    run = make("ours")
    return error_of(lambda: make_pipeline("ours", run, transport=WireTransport.PUSH))


def groups_made() -> list[int]:
    """How many process groups each of several pipelines, one after the other, made."""
    from torch.distributed.distributed_c10d import _world

    made = []
    for _ in range(3):
        run = make("ours")
        before = len(_world.pg_map)
        pipeline = make_pipeline("ours", run)
        losses_of(pipeline, batches(run, 2, is_fixed=True), 2)
        pipeline.close()
        made.append(len(_world.pg_map) - before)
        del pipeline, run
    return made


def everything_on_the_cpu() -> dict[str, Any]:
    """On a rank."""
    found: dict[str, Any] = {}
    for name, question in {
        "evaluated": evaluated_between,
        "iterators": two_iterators,
        "all but the last": all_but_the_last,
        "bad ids": bad_ids,
        "no data parallel": without_data_parallel,
    }.items():
        found[name] = {whose: question(whose) for whose in ("theirs", "ours")}
        if name != "all but the last":
            found[name]["nudged"] = question("theirs", nudged=True)
    found["four steps"] = {"theirs": four_steps(), "nudged": four_steps(nudged=True)}
    found["left early"] = left_early()
    found["fatal"] = fatal_ids()
    found["spare"] = spare_ids()
    found["failing reads"] = failing_reads()
    found["failing at first"] = failing_at_first()
    found["unequal"] = unequal_counts()
    found["wires"] = wires()
    found["push"] = pushing_on_the_cpu()
    found["groups"] = groups_made()
    found["falls back"] = what_falls_back()
    return found


@pytest.fixture(scope="module")
def ranks(cpu_answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["pipeline_use"] for answer in cpu_answers]


NUM_STEPS = {"evaluated": 12, "iterators": 9, "no data parallel": 6}
"""Steps of the uses that are compared in numbers."""


@pytest.mark.parametrize("name", NUM_STEPS)
def test_it_gives_what_torchrecs_gives(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank[name]
        assert_within_drift(
            found["ours"], found["theirs"], found["nudged"], num_steps=NUM_STEPS[name]
        )
    if name == "no data parallel":
        assert ranks[0][name]["ours"] != ranks[1][name]["ours"]


def test_what_was_read_of_an_iterator_is_trained(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        num_read, steps = rank["left early"]
        assert num_read < 9
        assert steps == [0] * num_read + [1] * 9


def test_it_leaves_out_the_last_batches_as_torchrecs_does(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["all but the last"] == {"theirs": 4, "ours": 4}


def test_bad_ids_count_as_fbgemms(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (theirs, _), (ours, lines) = rank["bad ids"]["theirs"], rank["bad ids"]["ours"]
        assert_within_drift(ours, theirs, rank["bad ids"]["nudged"][0], num_steps=4)
        assert lines == [
            "3 ids were outside their tables and counted as id 0, as bounds_check_mode has it"
        ]
        assert rank["spare"] == ([0, 1, 2, 0, 4, -1, -1], 1)
        assert re.match(
            r"IndexError: id out of range: table c, feature tags, position \d+ .* value 1000",
            rank["fatal"],
        )


def test_errors_of_reading_come_in_their_turn(ranks: list[dict[str, Any]]) -> None:
    both, one = zip(*(rank["failing reads"] for rank in ranks), strict=True)
    assert both == (["", "", "OSError: no such file"],) * 2
    assert one[1] == ["", "", "OSError: no such file"]
    other = "RuntimeError: another rank failed to read its batch, and its error says more"
    assert one[0] == ["", "", other]
    for rank in ranks:
        assert rank["failing at first"] == ["OSError: not there yet", "", "", "StopIteration: "]
    more = "RuntimeError: every rank must have equally many batches, but this one has more"
    assert [rank["unequal"].startswith(more) for rank in ranks] == [False, True]
    assert ranks[0]["unequal"] == "StopIteration: "


def test_what_it_has_not_is_torchrecs_and_one_rank_says_why(ranks: list[dict[str, Any]]) -> None:
    head = "TorchRec's TrainPipelineSparseDist trains, since "
    opaque = (
        "its batches are Opaque, and not tensors and KeyedJaggedTensors in tuples, lists, "
        "mappings, dataclasses and objects with a method to"
    )
    means = "sparse has means of row-wise tables among others, whose vectors TorchRec divides too"
    expected = {
        "nothing": [],
        "theirs": [f"{head}ShardedEmbeddingBagCollection (sparse) is sharded by TorchRec itself"],
        "settings": [f"{head}it is given custom_model_fwd"],
        "hooks": [f"{head}parameter over.0.weight has hooks, or an optimizer, in backward"],
        "opaque": [f"{head}{opaque}"],
        "means": [f"{head}{means}"],
        "adam": [
            f"{head}sparse has tables under Adam, part of whose update is computed on the host"
        ],
    }
    for number, rank in enumerate(ranks):
        found = rank["falls back"]
        lines = {name: lines for name, (lines, _) in found.items()}
        assert lines == (expected if number == 0 else {name: [] for name in expected})
        del found["means"], found["adam"]
        for _, losses in found.values():
            assert_within_drift(
                losses, rank["four steps"]["theirs"], rank["four steps"]["nudged"], num_steps=4
            )


def test_wires_are_torchrecs_where_we_have_them(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["wires"] == [
        (None, None),
        (torch.float16, torch.bfloat16),
        (None, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
        "vectors that are sent as int8",
        "quantized communication of several kinds",
    ]


def test_gpus_alone_push(ranks: list[dict[str, Any]]) -> None:
    assert re.match(
        r"ValueError: transport must be WireTransport.COLLECTIVE on cpu, got WireTransport.PUSH",
        ranks[0]["push"],
    )


def test_further_pipelines_make_no_process_groups(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["groups"][1:] == [0, 0]
