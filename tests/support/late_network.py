"""A network on which what was sent may arrive after what was sent later."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class _Way:
    """One connection of a client, and the one that it becomes at the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client, self._server = client, server
        self.passes = threading.Event()
        self.passes.set()
        self.threads = [threading.Thread(target=self._there), threading.Thread(target=self._back)]
        for thread in self.threads:
            thread.start()

    def _there(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(1 << 16):
                self.passes.wait()
                self._server.sendall(data)
        self.passes.wait()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)

    def _back(self) -> None:
        with self._client, self._server, contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                self._client.sendall(data)


class LateNetwork:
    """The way to a server on this machine, by a port of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ways: list[_Way] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def hold(self) -> None:
        """Keep what is sent by the connections of now."""
        for way in self._ways:
            way.passes.clear()

    def deliver(self) -> None:
        """Pass on what was kept; returns when those connections have ended, as clients have ended
        them."""
        held = [way for way in self._ways if not way.passes.is_set()]
        assert held
        for way in held:
            way.passes.set()
        for way in held:
            for thread in way.threads:
                thread.join(60)
                assert not thread.is_alive()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for way in self._ways:
            way.passes.set()
            for thread in way.threads:
                thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ways.append(_Way(client, server))


@contextlib.contextmanager
def late_network(port: int) -> Iterator[LateNetwork]:
    """A network to a server, whose connections have to be ended before the block is."""
    network = LateNetwork(port)
    try:
        yield network
    finally:
        network.close()
