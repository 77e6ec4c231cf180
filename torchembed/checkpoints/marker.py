"""The last file of a checkpoint, ``complete.json``: its presence makes the checkpoint count."""

from typing import NamedTuple

from torchembed.checkpoints.files.checked_json import from_checked_json, to_checked_json
from torchembed.checkpoints.files.storage import FileDigest


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
        return to_checked_json(self._asdict())

    @classmethod
    def parse(cls, content: bytes) -> "Marker":
        """The marker that the file's content describes.

        Raises:
            ValueError: if the content was changed or cut off since it was written.
        """
        try:
            fields = from_checked_json(content, is_required=False)
            # Damage to the name of the checksum's field must not pass for a marker of an earlier
            # release, which had none.
            if set(fields) != set(cls._fields):
                raise ValueError(f"fields must be {cls._fields}, got {list(fields)}")
            files = {name: FileDigest(*digest) for name, digest in fields["files"].items()}
            return cls(int(fields["step"]), int(fields["num_ranks"]), files)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"marker is not as it was written: {error}") from None
