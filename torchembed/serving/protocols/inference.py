"""One inference, whatever protocol it came by: found, read, answered, written and counted."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from torchembed.serving.interface import Answer, ModelDirectory, ModelForm
from torchembed.serving.protocols.metrics import ServerMetrics
from torchembed.serving.protocols.model_totals import RequestRecord


class ReadRequest(Protocol):
    """What any protocol's request is once it is read."""

    @property
    def inputs(self) -> dict[str, np.ndarray]: ...

    @property
    def outputs(self) -> Sequence[str] | None: ...


RequestT = TypeVar("RequestT", bound=ReadRequest)
WrittenT = TypeVar("WrittenT")


class Inferred(NamedTuple):
    """How an inference went, for the access log."""

    model: str
    version: str
    num_default_rows: int


def infer(
    directory: ModelDirectory,
    metrics: ServerMetrics,
    model: str,
    version: str | None,
    *,
    arrived: float,
    read: Callable[[], RequestT],
    write: Callable[[RequestT, Answer], WrittenT],
) -> tuple[WrittenT, Inferred]:
    """Answer one request, on this thread.

    Args:
        arrived: what ``time.perf_counter`` said when the request was there whole.

    Raises:
        What the directory, the model, ``read`` and ``write`` do; failures of a model that is there
        are counted.
    """
    began = read_at = answered = time.perf_counter()
    served = directory.model(model, version)
    form = served.form
    answer = None
    try:
        request = read()
        read_at = answered = time.perf_counter()
        answer = served.answer(request.inputs, request.outputs)
        answered = time.perf_counter()
        written = write(request, answer)
    except BaseException:
        ended = time.perf_counter()
        metrics.record(_record(form, form.version, None, arrived, began, read_at, answered, ended))
        raise
    ended = time.perf_counter()
    metrics.record(_record(form, answer.version, answer, arrived, began, read_at, answered, ended))
    return written, Inferred(form.name, answer.version, int(answer.num_default_rows))


def _record(
    form: ModelForm,
    version: str,
    answer: Answer | None,
    arrived: float,
    began: float,
    read_at: float,
    answered: float,
    ended: float,
) -> RequestRecord:
    return RequestRecord(
        model=form.name,
        version=version,
        succeeded=answer is not None,
        num_samples=0 if answer is None else _num_samples(form, answer.outputs),
        num_default_rows=0 if answer is None else int(answer.num_default_rows),
        queue_seconds=began - arrived,
        input_seconds=read_at - began,
        infer_seconds=answered - read_at,
        output_seconds=ended - answered,
    )


def _num_samples(form: ModelForm, outputs: Mapping[str, np.ndarray]) -> int:
    """The length that the first output with a batch has."""
    for tensor in form.outputs:
        array = outputs.get(tensor.name)
        if array is not None and tensor.shape and tensor.shape[0] == -1:
            return array.shape[0]
    return 1
