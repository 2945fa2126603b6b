"""What one router asks of the others, as a protocol: Ray answers it in production (ray_peers.py), a list in tests.

Never:     on a request's way to its tokens; only for showing.
Invariant: whoever does not answer in time costs its own answer alone, and is spoken of.
Thread:    the router's event loop.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Body = dict[str, Any]  # an answer of ``GET /route/{name}``


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the others said."""

    body: Body | None = None  # the newest; None: nobody who answered knows the name
    unanswered: str = ""  # who did not answer, as a clause; empty if all did


class Peers(Protocol):
    """The other routers of the application."""

    async def find_route(self, name: str) -> Found:
        """The answer of ``GET /route/{name}`` by the router that was the last to decide for that name."""
        ...


class Alone:
    """There is one router."""

    async def find_route(self, name: str) -> Found:
        return Found()


async def newest(asked: Sequence[Awaitable[Body | None]], *, within_s: float) -> Found:
    """Wait for each of ``asked``, all at once, up to ``within_s``; one that fails or is late has not answered."""
    answers = await asyncio.gather(*(asyncio.wait_for(each, within_s) for each in asked), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    found = [answer for answer in answers if isinstance(answer, dict)]
    unanswered = ""
    if failed:
        kinds = ", ".join(sorted({type(each).__name__ for each in failed}))
        unanswered = f"{len(failed)} of {len(asked)} routers did not answer within {within_s:g} s ({kinds})"
    return Found(body=newer(*found), unanswered=unanswered)


def newer(*bodies: Body | None) -> Body | None:
    """A name can come twice, and then means its last bearer."""
    found = [body for body in bodies if body is not None]
    return max(found, key=lambda body: float(body["time"]), default=None)
