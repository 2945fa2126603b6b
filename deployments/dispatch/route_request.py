"""What is asked of the routing router for one request: the query, the client's hints, and the refusal of a full house.

Never: chooses (routing/router.py) or sends (dispatch.py).
"""

from dataclasses import dataclass

from replicas.errors import MantaError
from replicas.types import GenerateRequest
from routing.types import RouteQuery


class Saturated(MantaError):
    """Every replica's queue is longer than ``router.max_wait_s``."""

    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHints:
    """What a client may wish for about the choice of a replica."""

    session_id: str = ""
    allowed: frozenset[str] | None = None  # None: every replica


NO_HINTS = RouteHints()


def query_of(
    request: GenerateRequest,
    hints: RouteHints,
    excluded: frozenset[str] = frozenset(),
    *,
    one_replica: str = "",
) -> RouteQuery:
    """``request`` as the routing router sees it; ``one_replica``: why prefill and decode must not be apart."""
    return RouteQuery(
        rid=request.rid,
        token_ids=request.token_ids,
        salt=request.cache_salt,
        max_new_tokens=request.sampling.max_new_tokens,
        priority=request.priority,
        session_id=hints.session_id,
        allowed=hints.allowed,
        excluded=excluded,
        one_replica=one_replica or why_one_replica(request),
    )


def why_one_replica(request: GenerateRequest) -> str:
    """What in ``request`` a hand-off cannot carry; "" if nothing."""
    sampling = request.sampling
    if sampling.n > 1:
        return f"its {sampling.n} choices share one prompt"
    if sampling.max_new_tokens == 0:
        return "no token is to be made"
    if request.prompt_logprobs_from is not None:
        return "logprobs of the prompt come from where it is computed"
    return ""
