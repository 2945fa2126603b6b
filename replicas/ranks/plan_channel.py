"""Rank 0's connections to its followers: which are admitted, and the plans that are sent over them.

Owns:      a listener until all followers have connected, and one connection for each of them.
Never:     lets a stranger, loud or silent, delay a follower.
Invariant: a follower has proved that it knows the key; when `accept` is over, nothing listens and no thread is left.
Thread:    the caller's; each connection proves itself on a thread of its own, which ends with `accept`.
"""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from replicas.errors import EngineDead, NotSent
from replicas.layers.adapters import AdapterOrder
from replicas.runner.kv_access import KvOrder
from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan

STEP_S = 0.05  # between two checks whether the wait is over


class _Caller(NamedTuple):
    """A connected process that has not proved itself yet: its socket, to hang up, and the thread that reads it."""

    socket: socket.socket
    connection: Connection
    thread: threading.Thread


class PlanChannel:
    """The connections over which rank 0 sends each plan, pickled once, to all followers."""

    def __init__(self, host: str, authkey: bytes) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(STEP_S)
        host, port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        self._authkey = authkey
        self._followers: list[Connection] = []
        self._sending = threading.Lock()  # plans are sent by one thread, adapters announced by another

    @property
    def connections(self) -> Sequence[Connection]:
        """The connections in the order in which they were admitted."""
        return self._followers

    def accept(self, count: int, *, timeout_s: float, dead: Callable[[], str | None]) -> None:
        """Wait until ``count`` followers have connected.

        Raises: EngineDead if one died first, or not all connected within ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        proving: list[_Caller] = []
        try:
            while len(self._followers) < count:
                gone = dead()
                if gone is not None:
                    raise EngineDead(f"{gone} before it was ready; its log says why")
                if time.monotonic() > deadline_s:
                    raise EngineDead(f"{len(self._followers)} of {count} ranks connected within {timeout_s:.0f} s")
                with suppress(TimeoutError):
                    proving.append(self._prove(self._listener.accept()[0]))
        except OSError as error:
            raise EngineDead(f"the ranks' channel was closed before all had connected: {error}") from error
        finally:
            self._listener.close()
            self._end(proving)

    def _prove(self, caller: socket.socket) -> "_Caller":
        connection = Connection(os.dup(caller.fileno()))
        thread = threading.Thread(target=self._admit, args=(connection,), name="manta-plan-admit", daemon=True)
        thread.start()
        return _Caller(caller, connection, thread)

    def _admit(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._authkey)
            answer_challenge(connection, self._authkey)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            self._followers.append(connection)

    def _end(self, proving: Sequence["_Caller"]) -> None:
        """Hang up on callers that are not admitted: this ends their threads' reads; closing alone would not."""
        for caller in proving:
            if caller.connection not in self._followers:  # an admitted one's thread may still be ending
                with suppress(OSError):
                    caller.socket.shutdown(socket.SHUT_RDWR)
            caller.thread.join()
            caller.socket.close()

    def send(self, message: StepPlan | KvOrder | AdapterOrder) -> None:
        """Send a plan or an order to all followers.

        Raises: EngineDead if a follower is gone; NotSent without memory to pickle it: none of them got it.
        """
        if isinstance(message, ExtendPlan | DecodePlan):
            message = replace(message, sampling=())  # rank 0 samples
        try:
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except MemoryError as error:
            raise NotSent("no memory is left to send the other ranks their orders: try again later") from error
        try:
            with self._sending:
                for follower in self._followers:
                    follower.send_bytes(data)
        except OSError as error:
            raise EngineDead(f"a tensor-parallel rank is gone: {error}; the replica must be restarted") from error

    def hear(self, number: int, *, timeout_s: float) -> list[str]:
        """Wait until each follower has said how an order that has a ``number`` went; one thread at a time.

        Returns: what went wrong, of each where something did.
        Raises:  TimeoutError if one has not said it within ``timeout_s``; EngineDead if one is gone.
        """
        deadline_s, wrong = time.monotonic() + timeout_s, []
        try:
            for follower in self._followers:
                told, why = 0, ""
                while told < number:  # what it said of orders before, of which nobody waited to hear, is passed over
                    if not follower.poll(max(0.0, deadline_s - time.monotonic())):
                        raise TimeoutError(f"a rank has not said within {timeout_s:g} s how order {number} went")
                    told, why = follower.recv()
                wrong += [why] if why else []
        except (EOFError, ConnectionError) as error:
            raise EngineDead(f"a tensor-parallel rank is gone: {error}; the replica must be restarted") from error
        return wrong

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        self._listener.close()
