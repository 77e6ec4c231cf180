"""Messages of updates: what is read is what was written, and what cannot be read says why."""

import dataclasses
import logging
import random
import struct
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fuzzed_messages import (
    NUM_FUZZED,
    fuzzed,
    message,
    messages_by_topic,
    sealed,
)
from torchembed.streams import dense_tensors
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.messages import (
    HEADER_BYTES,
    Message,
    MessageKind,
    decode,
    encode,
    max_body_bytes,
    max_rows_in,
)
from torchembed.streams.received_messages import Received, ReceivedMessages
from torchembed.streams.source_options import SourceOptions, SourceStatistics
from torchembed.streams.updates import ROW_DTYPES

_LOG = logging.getLogger(__name__)

# Offsets of fields in the header, behind magic and checksum.
FORMAT, KIND, DTYPE, WIDTH, COUNT = 8, 10, 11, 12, 16
SEQUENCE, PART, NUM_PARTS = 28, 52, 56


def changed(data: bytes, offset: int, form: str, value: int) -> bytes:
    """``data`` with another number at ``offset``, and the checksum that belongs to it."""
    number = struct.pack(form, value)
    return sealed(data[:offset] + number + data[offset + len(number) :])


def assert_fault(data: bytes, fault: MessageFault, match: str) -> None:
    with pytest.raises(MessageError, match=match) as caught:
        decode(data)
    assert caught.value.fault is fault


@settings(max_examples=50, derandomize=True, database=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.integers(1, 9),
    st.sampled_from(ROW_DTYPES),
    st.integers(0, 2**63 - 1),
    st.integers(1, 2**64 - 1),
)
def test_rows_and_deletions_are_what_was_written(
    keys: list[int], width: int, dtype: torch.dtype, version: int, sequence: int
) -> None:
    rows = torch.randn(len(keys), width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for kind in (MessageKind.ROWS, MessageKind.DELETIONS):
        sent = message(
            kind,
            keys=torch.tensor(keys, dtype=torch.int64),
            rows=rows if kind is MessageKind.ROWS else rows[:0],
            version=version,
            sequence=sequence,
        )
        data = encode(sent)
        row_bytes = width * dtype.itemsize if kind is MessageKind.ROWS else 0
        assert len(data) == HEADER_BYTES + 2 + len(keys) * (8 + row_bytes)
        found = decode(data)
        assert torch.equal(found.keys, sent.keys)
        assert found.rows.dtype is dtype or kind is MessageKind.DELETIONS
        assert torch.equal(found.rows, sent.rows)
        for field in dataclasses.fields(Message):
            if field.name not in ("keys", "rows"):
                assert getattr(found, field.name) == getattr(sent, field.name)


def test_rows_that_are_not_contiguous_are_copied() -> None:
    rows = torch.arange(12, dtype=torch.float32).view(4, 3).t()
    assert torch.equal(decode(encode(message(rows=rows))).rows, rows)


def test_a_part_of_a_dense_part_is_what_was_written() -> None:
    sent = message(MessageKind.DENSE, part=2)
    found = decode(encode(sent))
    assert found.piece == sent.piece
    assert (found.part, found.num_parts, found.all_parts_bytes) == (2, 3, 300)


def test_a_message_of_most_rows_has_at_most_the_wanted_size() -> None:
    for wanted, row_bytes in ((4096, 16), (900_000, 512), (5000, 1)):
        num_rows = max_rows_in(wanted, row_bytes)
        names = 2 * 120
        assert HEADER_BYTES + names + num_rows * (8 + row_bytes) <= wanted
        assert HEADER_BYTES + names + (num_rows + 1) * (8 + row_bytes) > wanted
        assert HEADER_BYTES + names + max_body_bytes(wanted) == wanted


@pytest.mark.parametrize("kind", MessageKind)
def test_each_message_that_is_cut_off_is_told(kind: MessageKind) -> None:
    data = encode(message(kind))
    for length in range(len(data)):
        assert_fault(data[:length], MessageFault.TRUNCATED, "bytes")
    assert_fault(data + b"\0", MessageFault.TRAILING, f"of {len(data)} bytes has {len(data) + 1}")


def test_each_byte_that_changed_is_told() -> None:
    data = encode(message())
    for place in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])


def test_faults_have_their_names() -> None:
    data = encode(message())
    assert_fault(b"RTCH" + data[4:], MessageFault.MAGIC, "must begin with b'TEMB', got b'RTCH'")
    assert_fault(b"other", MessageFault.MAGIC, "must have")
    assert_fault(changed(data, FORMAT, "<H", 3), MessageFault.FORMAT, "format must be 2, got 3")
    assert_fault(data[:-1] + b"\1", MessageFault.CHECKSUM, "not as it was written")
    assert_fault(changed(data, COUNT, "<I", 2**32 - 1), MessageFault.TRUNCATED, "bytes has")
    assert_fault(changed(data, WIDTH, "<I", 2**32 - 1), MessageFault.TRUNCATED, "bytes has")
    assert_fault(changed(data, SEQUENCE, "<Q", 0), MessageFault.CONTENTS, "sequence 0")
    assert_fault(changed(data, SEQUENCE, "<Q", 2**63), MessageFault.CONTENTS, f"sequence {2**63}")
    assert_fault(changed(data, SEQUENCE - 8, "<q", -1), MessageFault.CONTENTS, "version -1")
    assert_fault(changed(data, PART, "<I", 1), MessageFault.CONTENTS, "part 1 of 1")
    deletions = encode(message(MessageKind.DELETIONS, rows=torch.empty(0, 1)))
    assert_fault(changed(deletions, KIND, "<B", 9), MessageFault.CONTENTS, "9 is not a valid")
    assert_fault(changed(deletions, DTYPE, "<B", 9), MessageFault.CONTENTS, "out of range")
    no_rows = encode(message(num_keys=0))
    assert_fault(changed(no_rows, WIDTH, "<I", 0), MessageFault.CONTENTS, "rows of width 0")
    names = data[:HEADER_BYTES] + b"\xff" + data[HEADER_BYTES + 1 :]
    assert_fault(sealed(names), MessageFault.CONTENTS, "codec can't decode")


def test_what_cannot_be_written_is_told() -> None:
    with pytest.raises(TypeError, match=r"keys must be int64, got int32; call .long\(\)"):
        encode(message(keys=torch.zeros(3, dtype=torch.int32)))
    with pytest.raises(TypeError, match=r"rows must be .*, got float64; call .float\(\)"):
        encode(message(rows=torch.zeros(3, 2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="rows must be 3, one for each key, got 2"):
        encode(message(rows=torch.zeros(2, 2)))


def test_dense_tensors_are_what_was_written() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    sent = {str(dtype): torch.randint(0, 2, (3, 2)).to(dtype) for dtype in dtypes}
    sent |= {"one": torch.tensor(2.5), "none": torch.empty(0, 4), "t": torch.randn(4, 3).t()}
    found = dense_tensors.from_bytes(dense_tensors.to_bytes(sent))
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())
    with pytest.raises(TypeError, match=r"tensor c must have a dtype among .*, got complex64"):
        dense_tensors.to_bytes({"c": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "described",
    [
        '[["a","float32",[-1]]]',
        '[["a","float32",[true]]]',
        '[["a","float99",[1]]]',
        '[["a","float32",[1000000000000000000000]]]',
        '[["a","float32",[0,1000000000000000000000]]]',
        '[["a","uint8",[0]],["a","uint8",[0]]]',
        '[[1,"uint8",[0]]]',
        '{"a":1}',
        "[[]]",
        "1",
        "[" * 100_000,
        "",
    ],
)
def test_wrong_descriptions_of_dense_tensors_are_told(described: str) -> None:
    header = described.encode()
    with pytest.raises(MessageError, match="a dense part does not hold what it says") as caught:
        dense_tensors.from_bytes(struct.pack("<I", len(header)) + header)
    assert caught.value.fault is MessageFault.CONTENTS


def test_dense_tensors_of_another_length_are_told() -> None:
    data = dense_tensors.to_bytes({"a": torch.zeros(3)})
    with pytest.raises(MessageError, match="cut off"):
        dense_tensors.from_bytes(data[:-1])
    with pytest.raises(MessageError, match=r"a dense part of .* bytes has") as caught:
        dense_tensors.from_bytes(data + b"\0")
    assert caught.value.fault is MessageFault.TRAILING


def test_messages_that_went_wrong_never_crash() -> None:
    """Each is read or is a MessageError, and counted by its fault."""
    random_numbers = random.Random(0)
    of_topics = messages_by_topic()
    everything = [data for of_topic in of_topics.values() for data in of_topic]
    statistics = SourceStatistics()
    received = ReceivedMessages(SourceOptions(), statistics, lambda model, table: 2)
    num_read, faults = 0, Counter[MessageFault]()
    for number in range(NUM_FUZZED):
        topic = random_numbers.choice(list(of_topics))
        seeds = of_topics[topic] if random_numbers.random() < 0.9 else everything
        # Some as they are, so that dense parts are begun, and follow what went wrong.
        is_whole = random_numbers.random() < 0.2
        data = random_numbers.choice(seeds) if is_whole else fuzzed(random_numbers, seeds)
        try:
            received.update_of(Received(topic, 0, number, 0.0, data))
            num_read += 1
        except MessageError as error:
            faults[error.fault] += 1
    assert num_read + faults.total() == statistics.num_messages == NUM_FUZZED
    # A dense update that is given up counts besides the message that came in its place.
    extra = statistics.num_dropped - faults
    assert set(extra) <= {MessageFault.INCOMPLETE}
    assert not faults - statistics.num_dropped
    assert num_read > NUM_FUZZED / 10
    assert {
        MessageFault.TRUNCATED,
        MessageFault.TRAILING,
        MessageFault.MAGIC,
        MessageFault.FORMAT,
        MessageFault.CHECKSUM,
        MessageFault.CONTENTS,
        MessageFault.TOPIC,
        MessageFault.WIDTH,
        MessageFault.INCOMPLETE,
    } <= set(faults)
    dropped = {fault.value: count for fault, count in statistics.num_dropped.most_common()}
    _LOG.info("%d messages: %d read, dropped %s", NUM_FUZZED, num_read, dropped)
