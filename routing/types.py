"""What the router is asked, what it knows of each replica, and what it answers.

Owns:  nothing; these are frozen values, and the one error a choice can end in.
Never: holds a connection, a handle or a tensor; a replica is a string here.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = Sequence[int] | npt.NDArray[np.int32]  # [L] token ids


class NoReplica(Exception):
    """No replica may take the request now. The message lists what there is and why each was passed over."""

    http_status = 503
    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteQuery:
    """One request, as far as choosing a replica needs it."""

    rid: str
    token_ids: TokenIds  # [L] the tokenised prompt
    salt: str = ""  # cache_salt: prefixes are shared only within one salt
    max_new_tokens: int = 128
    priority: int = 0
    allowed: frozenset[str] | None = None  # None: every replica
    excluded: frozenset[str] = frozenset()  # for example those that a retry has already tried

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"request {self.rid} has no tokens; tokenise the prompt before choosing a replica")

    def permits(self, replica_id: str) -> bool:
        return replica_id not in self.excluded and (self.allowed is None or replica_id in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The last that a replica said of itself."""

    replica_id: str
    time_s: float  # when it was measured, on the router's clock
    num_running: int = 0
    num_waiting: int = 0
    queued_uncached_tokens: int = 0  # prompt tokens queued that no cache holds
    pool_utilization: float = 0.0  # share of the KV pool that a new request cannot have, 0 to 1
    prefill_tokens_per_s: float = 0.0  # 0 until measured
    decode_step_s: float = 0.0  # 0 until measured
    max_running_requests: int = 1
    healthy: bool = True
    accepting: bool = True  # False while it drains

    @property
    def may_take(self) -> bool:
        return self.healthy and self.accepting

    @property
    def state(self) -> str:
        if not self.healthy:
            return "unhealthy"
        return "accepting" if self.accepting else "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one router knows of a replica beyond the replica's last report."""

    in_flight: int = 0  # requests this router sent there that have not ended
    requests_since: int = 0  # of those, sent after the report was measured
    tokens_since: int = 0  # prompt tokens of ``requests_since``
    ended_since: int = 0  # requests sent before the report that ended after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may take the request, with its load as of now: the report corrected by what was sent since."""

    view: ReplicaView
    sent: Sent

    @property
    def replica_id(self) -> str:
        return self.view.replica_id

    @property
    def num_requests(self) -> int:
        """Requests running or waiting there; never less than this router itself has open."""
        reported = self.view.num_running + self.view.num_waiting
        return max(reported + self.sent.requests_since - self.sent.ended_since, self.sent.in_flight)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that must be computed there before a new request's; those just sent count in full."""
        return self.view.queued_uncached_tokens + self.sent.tokens_since


class Reason(enum.Enum):
    """Why the winner won."""

    ONLY = "only_candidate"
    TURN = "next_in_turn"
    FEWER_REQUESTS = "fewer_requests"
    FEWER_TOKENS = "fewer_queued_tokens"
    TIE = "tie_broken_at_random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy answers."""

    replica_id: str
    reason: Reason
    compared: tuple[str, ...]  # replicas whose load the policy looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and everything that decided it."""

    number: int  # counts this router's decisions; a retry of a request is a decision of its own
    rid: str
    replica_id: str
    policy: str
    reason: Reason
    compared: tuple[str, ...]
    candidates: tuple[Candidate, ...]  # all that might have taken it, by id
    num_tokens: int  # prompt length
    time_s: float  # on the router's clock


class Ending(enum.Enum):
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"  # the replica died or refused; the request may be tried elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a decision."""

    ending: Ending
    cached_tokens: int = 0  # prompt tokens the replica did not have to compute
    ttft_s: float | None = None  # from the decision to the first token; None if there was none
