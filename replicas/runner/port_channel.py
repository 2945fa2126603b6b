"""What rank 0 and a follower's port say to each other, without either ever waiting for the other.

Owns:      one socket, and what of it is not yet sent or not yet whole.
Never:     blocks but in `wait`.
Invariant: messages come whole and in order; a side that leaves MAX_UNREAD_BYTES unread counts as gone.

A frame is 4 bytes of length, big-endian, and a pickle: the two are one program, and the connection is authenticated.
"""

import math
import os
import pickle
import select
import socket
import struct
from multiprocessing.connection import Connection

MAX_UNREAD_BYTES = 16 << 20  # some 10,000 orders
READ_BYTES = 1 << 18
_LENGTH = struct.Struct(">I")


class PortChannel:
    def __init__(self, connection: Connection) -> None:
        """Takes the connection over."""
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._out = bytearray()
        self._in = bytearray()
        self._ended = False

    def send(self, message: object) -> None:
        """Raises: OSError when the other side is gone or reads nothing."""
        data = pickle.dumps(message)
        self._out += _LENGTH.pack(len(data)) + data
        self.flush()
        if len(self._out) > MAX_UNREAD_BYTES:
            raise TimeoutError(f"{len(self._out)} bytes are unread, at most {MAX_UNREAD_BYTES} may be")

    def flush(self) -> None:
        """As much as goes now. Raises: OSError."""
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            return

    def take(self) -> list[object]:
        """What has come. Raises: EOFError, when all has been taken and the other side is gone; OSError."""
        self.flush()
        self._read()
        messages: list[object] = []
        while len(self._in) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._in)[0]
            if len(self._in) < end:
                break
            messages.append(pickle.loads(bytes(self._in[_LENGTH.size : end])))
            del self._in[:end]
        if self._ended and not messages:
            raise EOFError("the other side has closed the connection")
        return messages

    def _read(self) -> None:
        try:
            while not self._ended:
                data = self._socket.recv(READ_BYTES)
                self._in += data
                self._ended = not data
        except BlockingIOError:
            return

    def wait(self, timeout_s: float) -> None:
        """Until something comes, at most so long."""
        poll = select.poll()  # takes descriptors of any number
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.poll(math.ceil(timeout_s * 1000))

    def close(self) -> None:
        self._socket.close()
