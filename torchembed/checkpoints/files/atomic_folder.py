"""A folder that counts only once its last file stands in it, put there in one atomic step."""

import secrets

from torchembed.checkpoints.files.storage import Storage
from torchembed.core import ranks


class AtomicFolder:
    """A folder that rank 0 begins, all ranks write files into, and rank 0 completes.

    Until then a token, which rank 0 wrote and every rank must see, stands in the place of the last
    file: a path on a local disk of each machine would else give a folder without most of its files.
    """

    def __init__(self, storage: Storage, path: str, last_file: str) -> None:
        """
        Args:
            path: of the folder, in ``storage``.
            last_file: name of the file whose presence makes the folder count.
        """
        self._storage = storage
        self._path = path
        self._last = f"{path}/{last_file}"
        self._unfinished = f"{path}/{unfinished(last_file)}"

    def begin(self) -> str:
        """Make the folder, and a new token in it. Returns the token."""
        token = secrets.token_hex(8)
        self._storage.mkdir(self._path)
        self._storage.write(self._unfinished, token.encode())
        return token

    def has_token(self, token: str) -> bool:
        """True where the folder is seen here as :meth:`begin` made it."""
        try:
            return self._storage.read(self._unfinished) == token.encode()
        except FileNotFoundError:
            return False

    def check_token(self, token: str) -> None:
        """Raise ``ValueError`` where the folder is not seen here as rank 0 made it."""
        if not self.has_token(token):
            raise ValueError(
                f"path must be one folder that all ranks see, and rank {ranks.rank()} does not see "
                f"in {self._storage.url} what rank 0 wrote there"
            )

    def complete(self, content: bytes) -> None:
        """Put the last file in its place, with ``content``."""
        self._storage.write(self._unfinished, content)
        self._storage.rename(self._unfinished, self._last)


def unfinished(last_file: str) -> str:
    """Name of the file that stands in the place of ``last_file`` until the folder is complete."""
    return f"{last_file}.partial"
