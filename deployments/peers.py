"""What one router asks of the others, as a protocol: Ray answers it in production (ray_peers.py), a list in tests.

Never: on a request's way to its tokens; only for showing.
"""

from typing import Any, Protocol


class Peers(Protocol):
    """The other routers of the application."""

    async def find_route(self, name: str) -> dict[str, Any] | None:
        """The answer of ``GET /route/{name}`` by whichever router has it; None if none does, or none answers."""
        ...


class Alone:
    """There is one router."""

    async def find_route(self, name: str) -> dict[str, Any] | None:
        return None
