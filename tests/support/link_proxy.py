"""A proxy for the control channels between daemons that can be cut: nothing passes, and nobody is told.

Bytes that arrive meanwhile are held back and passed on when it is healed, as a network may do.
"""

from __future__ import annotations

import contextlib
import socket
import threading


class LinkProxy:
    """Any number of ways through one cut."""

    def __init__(self) -> None:
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._closed = False

    def way_to(self, port: int) -> int:
        """A port that leads to `port`."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)
        self._run(self._accept, listener, port)
        number: int = listener.getsockname()[1]
        return number

    def cut(self) -> None:
        self._passing.clear()

    def heal(self) -> None:
        self._passing.set()

    def close(self) -> None:
        self._closed = True
        self._passing.set()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _run(self, work: object, *values: object) -> None:
        threading.Thread(target=work, args=values, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._passing.wait()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:  # nobody listens there yet
                    near.close()
                    continue
                self._sockets += [near, far]
                self._run(self._pump, near, far)
                self._run(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passing.wait()
                if self._closed:
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
