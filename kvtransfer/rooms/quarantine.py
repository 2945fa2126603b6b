"""Rooms that have failed while their peer may still write into their pages.

Owns:      who they are, whose word they wait for, and since when.
Never:     lets one go by time: only the peer's Drained, or its proven death (peers.py), takes it out.
Invariant: one entry per room and generation.
Thread:    the transfer thread.
"""

from dataclasses import dataclass

RoomKey = tuple[int, int]  # room, generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    incarnation: str
    since_s: float
    num_pages: int


class Quarantine:
    def __init__(self) -> None:
        self._held: dict[RoomKey, Held] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: RoomKey) -> bool:
        return key in self._held

    @property
    def num_pages(self) -> int:
        return sum(held.num_pages for held in self._held.values())

    def hold(self, key: RoomKey, held: Held) -> None:
        assert key not in self._held, f"room {key} is in quarantine already"
        self._held[key] = held

    def release(self, key: RoomKey) -> None:
        del self._held[key]

    def of(self, incarnation: str) -> list[RoomKey]:
        return [key for key, held in self._held.items() if held.incarnation == incarnation]

    def oldest_s(self, now: float) -> float:
        """For how long the oldest has waited; 0 when there is none."""
        return max((now - held.since_s for held in self._held.values()), default=0.0)
