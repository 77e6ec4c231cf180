"""How many requests, and how many bytes of them and of answers, are under way at once."""

import threading

from torchembed.serving.interface import BusyError
from torchembed.serving.protocols.options import RequestLimits


class Admission:
    """Counts what is under way, and lets nothing in above the limits or once it is closed."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._num_requests = 0
        self._num_bytes = 0
        self._num_unread_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let nothing more in; what is under way goes on."""
        self._closed = True

    def enter(self) -> None:
        """Let a request in, to be followed by :meth:`leave`.

        Raises:
            BusyError: where it cannot be.
        """
        with self._lock:
            if self._closed:
                raise BusyError("the server is about to end; ask another one")
            if self._num_requests >= self._limits.max_requests_at_once:
                raise BusyError(
                    f"{self._limits.max_requests_at_once} requests are under way, as many as the "
                    "server takes; ask again later"
                )
            self._num_requests += 1

    def take(self, num_bytes: int) -> None:
        """Let bytes of a request in that was let in.

        Raises:
            BusyError: where the requests under way have too many.
        """
        with self._lock:
            if self._num_bytes + num_bytes > self._limits.max_bytes_at_once:
                raise BusyError(
                    f"requests under way have more than {self._limits.max_bytes_at_once} bytes "
                    "together; ask again later"
                )
            self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """Let a request out, and the bytes that it took."""
        with self._lock:
            self._num_requests -= 1
            self._num_bytes -= num_bytes

    def check_room_for_answer(self) -> None:
        """Raise where no further answer should be computed, since clients do not read theirs.

        Raises:
            BusyError: where those that are not read have too many bytes.
        """
        if self._num_unread_bytes > self._limits.max_bytes_at_once:
            raise BusyError(
                f"answers that clients do not read have more than {self._limits.max_bytes_at_once} "
                "bytes together; ask again later"
            )

    def keep_answer(self, num_bytes: int) -> None:
        """Count the bytes of an answer, until :meth:`let_answer_go`."""
        with self._lock:
            self._num_unread_bytes += num_bytes

    def let_answer_go(self, num_bytes: int) -> None:
        """Count the bytes of an answer no more: its client has them, or is given up."""
        with self._lock:
            self._num_unread_bytes -= num_bytes
