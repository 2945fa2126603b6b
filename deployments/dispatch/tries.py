"""How often one request is tried: bounded, counted anew after a replica has served it for a while.

Owns:      the number of the try, and which replicas later tries leave out.
Never:     chooses or sends (dispatch.py).
Invariant: between two stretches of STEADY_S in which tokens came, at most ``max_tries`` tries fail. So a stream that
           outlives many replicas goes on, and a request that kills each after a few tokens kills ``max_tries``.
Thread:    the router's event loop.
"""

from collections.abc import Callable

from deployments.dispatch.leases import ReplicaHangs
from replicas.errors import MantaError

STEADY_S = 10.0  # a replica that brought tokens for so long was no failed try


class Tries:
    """The tries of one request."""

    def __init__(self, max_tries: int, clock: Callable[[], float]) -> None:
        self._max_tries = max_tries
        self._clock = clock
        self.number = 0  # of the try, over all: names differ by it
        self.excluded: frozenset[str] = frozenset()
        self._num_failed = 0  # since a replica served it for a while
        self._first_s: float | None = None  # when this try brought its first and last tokens
        self._last_s = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the request has failed if this try does."""
        return self._num_failed + 1 >= self._max_tries and not self._steady

    @property
    def is_last_of_several(self) -> bool:
        return self.is_last and self._num_failed > 0

    def brought_tokens(self) -> None:
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    def failed(self, replica_id: str, error: MantaError) -> bool:
        """This try failed at ``replica_id``. Returns: whether there is another one."""
        if self._steady:
            self._num_failed, self.excluded = 0, frozenset()
        if not isinstance(error, ReplicaHangs):  # one that hangs is out of choice for as long as it does (fleet.py)
            self.excluded |= {replica_id}
        self._num_failed += 1
        self.number += 1
        self._first_s = None
        return self._num_failed < self._max_tries

    @property
    def _steady(self) -> bool:
        return self._first_s is not None and self._last_s - self._first_s >= STEADY_S
