"""Clients over gRPC that send too much, too slowly or nothing at all."""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from tests.support.served_models import EchoModel, HeldModel, MemoryDirectory
from tests.support.waiting import wait_until
from torchembed.serving.protocols import (
    ClientTimeouts,
    GrpcServer,
    RequestLimits,
    ServerMetrics,
    ServerOptions,
)
from torchembed.serving.protocols.grpc_messages import ModelInferRequest, ModelInferResponse

SERVICE = "/inference.GRPCInferenceService/"
LIMITS = RequestLimits(max_body_bytes=20_000, max_header_bytes=2000, max_tensors=3, max_elements=9)
NUM_THREADS = 2
CODES = grpc.StatusCode


@contextlib.contextmanager
def running(
    directory: MemoryDirectory | None = None,
    metrics: ServerMetrics | None = None,
    *,
    channel_options: Sequence[tuple[str, int]] = (),
    **options: Any,
) -> Iterator[grpc.Channel]:
    """A channel to a server."""
    server = GrpcServer(
        directory or MemoryDirectory().with_loaded(EchoModel()),
        options=ServerOptions(num_threads=NUM_THREADS, **options),
        metrics=metrics,
    )
    server.start()
    try:
        with grpc.insecure_channel(server.address, options=channel_options) as channel:
            yield channel
    finally:
        server.stop(0)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with running(limits=LIMITS) as channel:
        yield channel


def message(num_elements: int = 2, **names: int) -> bytes:
    request = ModelInferRequest(model_name="echo")
    request.inputs.add(name="int8", datatype="INT8", shape=[num_elements // 2, 2])
    request.raw_input_contents.append(bytes(num_elements))
    for name, count in names.items():
        for number in range(count):
            request.parameters[f"{name}{number}"].int64_param = number
    return request.SerializeToString()


def asked(channel: grpc.Channel, data: bytes, **more: Any) -> Any:
    """The answer, once the server takes connections."""
    data = channel.unary_unary(f"{SERVICE}ModelInfer")(
        data, timeout=60, wait_for_ready=True, **more
    )
    return ModelInferResponse.FromString(data)


def refused(channel: grpc.Channel, data: bytes, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        asked(channel, data, **more)
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


def in_progress(metrics: ServerMetrics) -> float:
    text = metrics.text()[0].decode().splitlines()
    (line,) = (t for t in text if t.startswith('torchembed_requests_in_progress{protocol="grpc"}'))
    return float(line.split()[1])


def test_what_is_too_large_is_refused(channel: grpc.Channel) -> None:
    assert asked(channel, message(8)).raw_output_contents == [bytes(8)]
    code, text = refused(channel, message(10))
    assert code is CODES.RESOURCE_EXHAUSTED and "'int8' must have at most 9 elements" in text
    request = ModelInferRequest(model_name="echo")
    for number in range(4):
        request.inputs.add(name=f"i{number}")
    code, text = refused(channel, request.SerializeToString())
    assert (code, text) == (CODES.RESOURCE_EXHAUSTED, "inputs must be at most 3, got 4")
    code, text = refused(channel, message(), metadata=[("x", "y" * 3000)])
    assert code is CODES.RESOURCE_EXHAUSTED and "metadata" in text
    assert asked(channel, message()).model_version == "1"


def test_a_message_that_is_too_large_is_refused_before_it_is_received(
    channel: grpc.Channel,
) -> None:
    # gRPC reads the length before the message; 2 MB more than it says would not fit its window.
    code, text = refused(channel, bytes(LIMITS.max_body_bytes + 1))
    assert code is CODES.RESOURCE_EXHAUSTED
    assert "larger than max (20001 vs. 20000)" in text
    assert asked(channel, message()).model_version == "1"


def test_limits_may_be_beyond_those_of_grpc() -> None:
    limits = RequestLimits(max_body_bytes=1 << 32, max_header_bytes=1 << 32)
    timeouts = ClientTimeouts(idle_seconds=1e9, receive_seconds=1e9, send_seconds=1e9)
    directory = MemoryDirectory().with_loaded(EchoModel())
    server = GrpcServer(directory, options=ServerOptions(limits=limits, timeouts=timeouts))
    server.start()
    try:
        with grpc.insecure_channel(server.address) as channel:
            assert asked(channel, message()).model_version == "1"
    finally:
        server.stop(0)


def test_bytes_under_way_are_bounded_together() -> None:
    held = HeldModel(EchoModel())
    limits = RequestLimits(max_bytes_at_once=1500)
    with running(MemoryDirectory().with_loaded(held), limits=limits) as channel:
        first = channel.unary_unary(f"{SERVICE}ModelInfer").future(
            message(1000), timeout=60, wait_for_ready=True
        )
        assert held.begun.acquire(timeout=60)
        code, text = refused(channel, message(1000))
        assert code is CODES.UNAVAILABLE and "more than 1500 bytes together" in text
        held.let_go.set()
        assert ModelInferResponse.FromString(first.result()).raw_output_contents == [bytes(1000)]
        assert asked(channel, message(1000)).model_version == "1"


class Silent:
    """Calls that have begun and whose messages are still to come."""

    def __init__(self, channel: grpc.Channel, num_calls: int) -> None:
        # gRPC's clients end a call of one message with it; those of a stream wait for more.
        begin = channel.stream_unary(f"{SERVICE}ModelInfer")
        self.messages: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(num_calls)]
        self.calls = [
            begin.future(iter(messages.get, b""), timeout=60, wait_for_ready=True)
            for messages in self.messages
        ]

    def end(self) -> None:
        """Let the clients' threads end."""
        for messages in self.messages:
            messages.put(b"")


# More of them than there are threads that compute.
NUM_SILENT = 4 * NUM_THREADS


def test_calls_without_a_message_keep_nobody_waiting() -> None:
    metrics = ServerMetrics()
    with running(metrics=metrics) as channel:
        silent = Silent(channel, NUM_SILENT)
        wait_until(lambda: in_progress(metrics) == NUM_SILENT)
        assert not any(call.done() for call in silent.calls)
        assert asked(channel, message()).model_version == "1"
        silent.messages[0].put(message())
        # A client that sends its message in time and then nothing is answered all the same.
        found = ModelInferResponse.FromString(silent.calls[0].result())
        assert found.model_version == "1"
        assert in_progress(metrics) == NUM_SILENT - 1
        silent.end()


def test_calls_without_a_message_are_cut_off() -> None:
    metrics = ServerMetrics()
    timeouts = ClientTimeouts(receive_seconds=0.5)
    with running(metrics=metrics, timeouts=timeouts) as channel:
        silent = Silent(channel, NUM_SILENT)
        assert {call.code() for call in silent.calls} == {CODES.CANCELLED}
        wait_until(lambda: in_progress(metrics) == 0)
        silent.end()


NUM_ELEMENTS = 3 << 20
# Or the client would read ahead whatever comes.
WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))


def unread(channel: grpc.Channel) -> Any:
    """A call that is answered, and whose answer is read when it is asked for."""
    begin = channel.unary_stream(f"{SERVICE}ModelInfer")
    call = begin(message(NUM_ELEMENTS), timeout=60, wait_for_ready=True)
    call.initial_metadata()
    return call


def check_read(call: Any) -> None:
    (data,) = call
    assert ModelInferResponse.FromString(data).raw_output_contents == [bytes(NUM_ELEMENTS)]


def is_read(call: Any) -> bool:
    """Whether a call's answer is read, and not given up, as a busy machine may have it."""
    try:
        check_read(call)
    except grpc.RpcError:
        return False
    return True


TWO_ANSWERS = RequestLimits(max_bytes_at_once=2 * len(message(NUM_ELEMENTS)) + 1000)


def is_answered(channel: grpc.Channel) -> bool:
    """Whether a call is answered, and not refused since others do not read their answers, or given
    up like them, as a busy machine may have it."""
    call = channel.unary_unary(f"{SERVICE}ModelInfer").future(message(), timeout=60)
    if call.exception() is None:
        return True
    if call.code() is CODES.CANCELLED:
        return False
    assert call.code() is CODES.UNAVAILABLE
    assert "answers that clients do not read have more than" in call.details()
    return False


def test_answers_that_are_not_read_are_bounded_together() -> None:
    with running(limits=TWO_ANSWERS, channel_options=WINDOW) as channel:
        calls = [unread(channel), unread(channel)]
        assert is_answered(channel)
        calls.append(unread(channel))
        assert not is_answered(channel)
        for call in calls:
            check_read(call)
        wait_until(lambda: is_answered(channel))


def test_answers_that_are_not_read_in_time_are_given_up() -> None:
    timeouts = ClientTimeouts(send_seconds=1.0)
    with running(timeouts=timeouts, limits=TWO_ANSWERS, channel_options=WINDOW) as channel:
        calls = [unread(channel) for _ in range(3)]
        # Answered, since the first of them was given up, if not others, too.
        wait_until(lambda: is_answered(channel))
        with pytest.raises(grpc.RpcError) as caught:
            next(calls[0])
        assert caught.value.code() is CODES.CANCELLED  # type: ignore[attr-defined]
        wait_until(lambda: is_read(unread(channel)))


def test_calls_that_end_without_a_message_are_refused(channel: grpc.Channel) -> None:
    empty = channel.stream_unary(f"{SERVICE}ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        empty(iter(()), timeout=60, wait_for_ready=True)
    assert caught.value.code() is CODES.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert caught.value.details() == "the call must have a message, got none"  # type: ignore[attr-defined]


def test_no_more_inferences_run_at_once_than_there_are_threads_and_health_waits_for_none() -> None:
    held, metrics = HeldModel(EchoModel()), ServerMetrics()
    with running(MemoryDirectory().with_loaded(held), metrics) as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        calls = [
            infer.future(message(), timeout=60, wait_for_ready=True) for _ in range(3 * NUM_THREADS)
        ]
        for _ in range(NUM_THREADS):
            assert held.begun.acquire(timeout=60)
        wait_until(lambda: in_progress(metrics) == len(calls))
        assert channel.unary_unary(f"{SERVICE}ServerReady")(b"", timeout=60) == b"\x08\x01"
        assert not held.begun.acquire(blocking=False)
        held.let_go.set()
        for call in calls:
            found = ModelInferResponse.FromString(call.result())
            assert found.raw_output_contents == [bytes(2)]
