"""Which pages are copied to the host tier, and when (stand-in of the lead until B's lands)."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.pages import PageKey, PageKeys


@dataclass(slots=True)
class WritePolicy:
    """Copies at eviction, all."""

    name: str
    idle_fraction: float = 0.25

    @staticmethod
    def make(name: str, *, clock: Callable[[], float], ghost_capacity: int) -> "WritePolicy":
        return WritePolicy(name)

    def at_insert(self, hits: int) -> bool:
        return self.name == "write_through" or (self.name == "write_through_selective" and hits >= 1)

    def admits(self, first_key: PageKey, *, hits: int, victim_age_s: float | None) -> bool:
        return True

    def computed(self, keys: PageKeys, now_s: float) -> None: ...

    def dropped(self, keys: PageKeys, now_s: float) -> None: ...
