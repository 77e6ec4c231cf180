"""Messages of updates of model ``m``, and such as went wrong."""

import dataclasses
import os
import random
import struct
import zlib

import torch

from torchembed.streams import dense_tensors, hugectr_messages
from torchembed.streams.messages import Message, MessageKind, encode

NUM_FUZZED = int(os.environ.get("TORCHEMBED_FUZZED_MESSAGES", "10000"))


def message(kind: MessageKind = MessageKind.ROWS, num_keys: int = 3, **fields: object) -> Message:
    made = Message(
        kind=kind,
        model="m",
        table="" if kind is MessageKind.DENSE else "t",
        version=7,
        sequence=5,
        publisher=1_795_478_981_000_000,
        published_at_micros=1_795_478_982_000_000,
        keys=torch.arange(num_keys) - 1,
        rows=torch.arange(num_keys * 2, dtype=torch.float32).view(num_keys, 2),
    )
    if kind is MessageKind.DENSE:
        piece = bytes(range(100))
        made = dataclasses.replace(made, piece=piece, all_parts_bytes=300, num_parts=3)
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def sealed(data: bytes) -> bytes:
    """``data`` with the checksum that belongs to it."""
    return data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:]


def fuzzed(random_numbers: random.Random, seeds: list[bytes]) -> bytes:
    """A message that went wrong: cut, prolonged, changed, mixed; half of them sealed anew."""
    data = bytearray(random_numbers.choice(seeds))
    for _ in range(random_numbers.randint(1, 4)):
        place = random_numbers.randrange(len(data)) if data else 0
        kind = random_numbers.randrange(6)
        if kind == 0:
            del data[place:]
        elif kind == 1:
            data[place:place] = random_numbers.randbytes(random_numbers.randint(1, 40))
        elif kind == 2 and data:
            data[place] = random_numbers.randrange(256)
        elif kind == 3:
            number = random_numbers.choice([0, 1, 2**16 - 1, 2**31, 2**32 - 1])
            data[place : place + 4] = struct.pack("<I", number)
        elif kind == 4:
            other = random_numbers.choice(seeds)
            data[place:] = other[random_numbers.randrange(len(other)) :]
        else:
            del data[place : place + random_numbers.randint(1, 8)]
    is_sealed = random_numbers.random() < 0.5 and len(data) > 8
    return sealed(bytes(data)) if is_sealed else bytes(data)


def messages_by_topic() -> dict[str, list[bytes]]:
    """Messages for table ``t`` of two columns, one of them of another width, and for the dense
    part."""
    rows, vectors = message(), torch.randn(3, 2)
    dense = dense_tensors.to_bytes({"w": torch.randn(4, 4), "b": torch.zeros(3)})
    half = len(dense) // 2
    parts = [
        message(
            MessageKind.DENSE,
            piece=piece,
            all_parts_bytes=len(dense),
            num_parts=2,
            part=part,
            sequence=5 + part,
        )
        for part, piece in enumerate((dense[:half], dense[half:]))
    ]
    return {
        "torchembed.m.t": [
            encode(rows),
            encode(message(MessageKind.DELETIONS)),
            encode(message(rows=torch.zeros(3, 5))),
        ],
        "torchembed-dense.m": [encode(part) for part in parts],
        "hps_et.m.t": [
            hugectr_messages.encode_pairs(rows.keys, vectors),
            hugectr_messages.encode_pairs(rows.keys[:0], vectors[:0]),
        ],
    }
