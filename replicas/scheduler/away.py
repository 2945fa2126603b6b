"""Requests that wait for another replica, or for a sibling that does: no step runs them.

Owns:      who they are.
Invariant: each is RECEIVING or HANDING_OFF and holds row and pages, or WAITING (parked) and holds nothing.
Thread:    scheduler thread only.
"""

from collections.abc import Iterator

from replicas.request import Req, ReqState


class Away:
    """In the order in which they went."""

    def __init__(self) -> None:
        self._reqs: dict[tuple[str, int], Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, req: Req) -> bool:
        return (req.rid, req.index) in self._reqs

    def add(self, req: Req) -> None:
        self._reqs[(req.rid, req.index)] = req

    def remove(self, req: Req) -> None:
        del self._reqs[(req.rid, req.index)]

    def in_state(self, state: ReqState) -> list[Req]:
        return [req for req in self._reqs.values() if req.state is state]

    def check(self) -> None:
        for req in self._reqs.values():
            assert req.state in (ReqState.WAITING, ReqState.RECEIVING, ReqState.HANDING_OFF), f"{req.rid}: {req.state}"
            assert (req.holding is None) == (req.state is ReqState.WAITING), f"{req.rid} is {req.state}: {req.holding}"
