"""The last file of a checkpoint, ``complete.json``: its presence makes the checkpoint count."""

import json
import re
import zlib
from typing import NamedTuple

from torchembed.checkpoints.storage import FileDigest

_WITH_CHECKSUM = re.compile(rb'(?P<fields>.*), "crc32": "(?P<crc32>[0-9a-f]{8})"\}', re.DOTALL)


class Marker(NamedTuple):
    """Content of a checkpoint's marker file: what the other files must be.

    The file is JSON of one object, whose last field ``crc32`` is the CRC-32 of all bytes before it,
    so that damage to the marker itself is noticed. Earlier releases wrote no such field.
    """

    step: int
    num_ranks: int
    """Number of ranks that saved."""
    files: dict[str, FileDigest]
    """Size and checksum of each other file, by its name in the checkpoint's folder."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        fields = json.dumps(self._asdict()).encode()[:-1]
        return fields + f', "crc32": "{zlib.crc32(fields):08x}"}}'.encode()

    @classmethod
    def parse(cls, content: bytes) -> "Marker":
        """The marker that the file's content describes.

        Raises:
            ValueError: where the content was changed or cut off since it was written.
        """
        try:
            found = _WITH_CHECKSUM.fullmatch(content)
            if found is not None:
                if int(found["crc32"], 16) != zlib.crc32(found["fields"]):
                    raise ValueError(f"checksum must be {zlib.crc32(found['fields']):08x}")
                content = found["fields"] + b"}"
            fields = json.loads(content)
            # Damage to the name of the checksum's field must not pass for a marker of an earlier
            # release, which had none.
            if set(fields) != set(cls._fields):
                raise ValueError(f"fields must be {cls._fields}, got {list(fields)}")
            files = {name: FileDigest(*digest) for name, digest in fields["files"].items()}
            return cls(int(fields["step"]), int(fields["num_ranks"]), files)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"marker is not as it was written: {error}") from None
