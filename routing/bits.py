"""Which bit stands for which replica in the prefix index.

Owns:      the bits: given out, given up (retired) and, once no page has them any more, free again.
Never:     knows a page.
Invariant: a bit is a present replica's, or retired, or free; never two of them.
Thread:    the router's own.
"""

import numpy as np
import numpy.typing as npt


class Bits:
    """A replica is a small number of the caller's; its bit is ``1 << position``."""

    def __init__(self) -> None:
        self.present = 0  # bits that stand for a replica
        self.retired = 0  # bits that were given up and may still be in pages
        self.num_positions = 0
        self._free: list[int] = []  # positions
        self._of = np.zeros(8, dtype=np.intp)  # position by replica

    def take(self, replica: int) -> int:
        """A bit that no page has, for ``replica``."""
        if not self._free:
            self._free.append(self.num_positions)
            self.num_positions += 1
        if replica >= len(self._of):
            self._of = np.resize(self._of, 2 * replica)
        position = self._of[replica] = self._free.pop()
        bit = 1 << position
        self.present |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Its replica is gone, or holds nothing of what has the bit."""
        self.present ^= bit
        self.retired |= bit

    def recycle(self, bits: int) -> None:
        """No page has these retired bits any more."""
        self.retired &= ~bits
        self._free += positions(bits)

    def of_replicas(self, values: npt.NDArray[np.int64], replicas: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Of ``values`` by position, those of ``replicas`` [n]. Returns [n]."""
        return values[self._of[replicas]]

    def check(self, of_replicas: dict[int, int]) -> None:
        """Raises AssertionError if a bit is lost, has two owners, or is not the one in ``of_replicas``."""
        assert not self.present & self.retired
        free = sum(1 << position for position in self._free)
        assert free ^ self.present ^ self.retired == (1 << self.num_positions) - 1, "a bit is lost, or free and in use"
        assert sum(of_replicas.values()) == self.present
        assert all(bit == 1 << int(self._of[replica]) for replica, bit in of_replicas.items())


def positions(bits: int) -> list[int]:
    """Positions of the bits that are 1."""
    if bits.bit_count() > 16:
        raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        many: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
        return many
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
