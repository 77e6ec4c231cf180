"""Parts of dense updates: whole ones come out, and nothing is held for ever."""

import dataclasses

import pytest

from torchembed.streams.dense_gathering import DenseGathering
from torchembed.streams.message_error import MessageError, MessageFault
from torchembed.streams.messages import Message, MessageKind


def parts(pieces: list[bytes], *, publisher: int = 1, first: int = 1) -> list[Message]:
    return [
        Message(
            kind=MessageKind.DENSE,
            model="m",
            version=1,
            sequence=first + number,
            publisher=publisher,
            published_at_micros=0,
            part=number,
            num_parts=len(pieces),
            all_parts_bytes=sum(map(len, pieces)),
            piece=piece,
        )
        for number, piece in enumerate(pieces)
    ]


def assert_fault(gathering: DenseGathering, part: Message, fault: MessageFault) -> None:
    with pytest.raises(MessageError) as caught:
        gathering.add(part, 99)
    assert caught.value.fault is fault


def test_the_last_part_gives_the_whole() -> None:
    gathering = DenseGathering(100)
    a, b, c = parts([b"one", b"two", b"three"])
    assert gathering.first_offset is None
    assert gathering.add(a, 10) is None
    assert gathering.add(b, 11) is None
    assert gathering.first_offset == 10
    assert gathering.add(c, 12) == b"onetwothree"
    assert gathering.first_offset is None
    assert gathering.add(parts([b"x"], first=4)[0], 13) == b"x"
    assert gathering.num_given_up == 0


def test_parts_may_come_twice() -> None:
    gathering = DenseGathering(100)
    a, b, c = parts([b"one", b"two", b"three"])
    found = [gathering.add(part, number) for number, part in enumerate((a, a, b, a, b, c))]
    assert found == [None] * 5 + [b"onetwothree"]


def test_a_later_update_takes_the_place_of_one_that_never_came_whole() -> None:
    gathering = DenseGathering(100)
    a, _, _ = parts([b"one", b"two", b"three"])
    d, e = parts([b"four", b"five"], publisher=2)
    gathering.add(a, 10)
    assert gathering.add(d, 11) is None
    assert (gathering.first_offset, gathering.num_given_up) == (11, 1)
    assert gathering.add(e, 12) == b"fourfive"


def test_a_part_without_those_before_it_is_told() -> None:
    gathering = DenseGathering(100)
    a, b, c = parts([b"one", b"two", b"three"])
    assert_fault(gathering, b, MessageFault.INCOMPLETE)
    gathering.add(a, 10)
    assert_fault(gathering, c, MessageFault.INCOMPLETE)
    assert (gathering.first_offset, gathering.num_given_up) == (None, 1)


def test_parts_that_do_not_fit_are_told() -> None:
    a, b = parts([b"one", b"two"])
    for wrong in (
        dataclasses.replace(b, all_parts_bytes=7),
        dataclasses.replace(b, num_parts=3),
        dataclasses.replace(b, version=2),
        dataclasses.replace(b, piece=b"more"),
        dataclasses.replace(b, piece=b"s"),
    ):
        gathering = DenseGathering(100)
        gathering.add(a, 10)
        assert_fault(gathering, wrong, MessageFault.CONTENTS)
        assert gathering.first_offset is None


def test_what_is_too_large_is_told_at_its_first_part() -> None:
    gathering = DenseGathering(5)
    assert_fault(gathering, parts([b"one", b"two"])[0], MessageFault.TOO_LARGE)
    assert gathering.first_offset is None
