"""Messages of HugeCTR's parameter server, by their bytes."""

import struct

import pytest
import torch

from torchembed.streams.hugectr_messages import decode_pairs, encode_pairs
from torchembed.streams.message_error import MessageError, MessageFault


def test_bytes_are_those_that_hugectr_sends() -> None:
    keys, rows = torch.tensor([3, 2**32 - 1]), torch.tensor([[1.0, -2.0], [0.5, 4.0]])
    of_8 = struct.pack("<4sIqffqff", b"HCTR", 8, 3, 1.0, -2.0, 2**32 - 1, 0.5, 4.0)
    of_4 = struct.pack("<4sIIffIff", b"HCTR", 8, 3, 1.0, -2.0, 2**32 - 1, 0.5, 4.0)
    assert encode_pairs(keys, rows) == of_8
    assert encode_pairs(keys, rows, 4) == of_4
    for data, key_bytes in ((of_8, 8), (of_4, 4)):
        found = decode_pairs(data, key_bytes)
        assert torch.equal(found.keys, keys)
        assert torch.equal(found.rows, rows)


def test_any_int64_is_a_key_of_8_bytes() -> None:
    keys = torch.tensor([-1, -(2**63), 2**63 - 1])
    assert torch.equal(decode_pairs(encode_pairs(keys, torch.zeros(3, 1))).keys, keys)


def test_a_beacon_has_no_pairs() -> None:
    """Of whatever width: HugeCTR's own says the size of an address."""
    for width in (0, 8, 3):
        found = decode_pairs(struct.pack("<4sI", b"HCTR", width))
        assert found.keys.shape == (0,)
    assert encode_pairs(torch.empty(0, dtype=torch.int64), torch.empty(0, 2)) == b"HCTR\x08\0\0\0"


@pytest.mark.parametrize("key_bytes", [4, 8])
def test_messages_that_are_cut_off_are_told_unless_whole_pairs_are_left(key_bytes: int) -> None:
    data = encode_pairs(torch.arange(3), torch.randn(3, 4), key_bytes)
    for length in range(len(data)):
        num_pairs, rest = divmod(length - 8, key_bytes + 16)
        if length >= 8 and not rest:
            assert len(decode_pairs(data[:length], key_bytes).keys) == num_pairs
            continue
        with pytest.raises(MessageError) as caught:
            decode_pairs(data[:length], key_bytes)
        assert caught.value.fault is MessageFault.TRUNCATED


def test_faults_have_their_names() -> None:
    for data, fault, match in (
        (b"RTCH\x08\0\0\0", MessageFault.MAGIC, "must begin with b'HCTR', got b'RTCH'"),
        (b"no", MessageFault.MAGIC, "must have 8 bytes, got 2"),
        (b"HCTR\0\0\0\0" + bytes(16), MessageFault.CONTENTS, "multiple of 4 bytes, got 0"),
        (b"HCTR\x06\0\0\0" + bytes(14), MessageFault.CONTENTS, "multiple of 4 bytes, got 6"),
        (b"HCTR\xff\xff\xff\x7f" + bytes(9), MessageFault.CONTENTS, "got 2147483647"),
        (b"HCTR\xfc\xff\xff\x7f" + bytes(9), MessageFault.TRUNCATED, "must fill a message, got 9"),
    ):
        with pytest.raises(MessageError, match=match) as caught:
            decode_pairs(data)
        assert caught.value.fault is fault


def test_what_cannot_be_written_is_told() -> None:
    rows = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"key_bytes must be one of \[4, 8\], got 2"):
        encode_pairs(torch.tensor([1]), rows, 2)
    with pytest.raises(ValueError, match=r"keys must be from 0 to 2\^32 - 1 .* got -1 to -1"):
        encode_pairs(torch.tensor([-1]), rows, 4)
    with pytest.raises(ValueError, match=r"must fit, got \(2,\) and \(1, 2\)"):
        encode_pairs(torch.tensor([1, 2]), rows)
    with pytest.raises(TypeError, match="rows must be float32, got float16"):
        encode_pairs(torch.tensor([1]), rows.half())
