"""Ends: where requests go on with a text, and what it is worth to keep what they need there.

Owns:      how often requests have gone on behind each kind of end, by how long it had waited.
Never:     knows pages, or frees anything (cache/parts.py).
Thread:    scheduler thread only.
Source:    Beckmann et al. 2018, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI). What differs: the
           classes are kinds of ends; and an age's chance of a hit is estimated from all ends that reached that age
           (Kaplan and Meier 1958), so that one which was evicted before says nothing of later ages.
"""

import enum

import numpy as np
import numpy.typing as npt

Ages = npt.NDArray[np.int64]
PER_OCTAVE, NUM_AGES = 4, 96  # ages are counted by quarters of an octave, up to 2**24 requests
SOME = 64  # ends, or one in so many of those that count: after as many more, what they are worth is computed anew
PRIOR = 4  # ends of each kind and age that are counted before the first one is seen


class End(enum.IntEnum):
    """What a part is good for: which of a text's ends needs it."""

    NONE = 0  # it is inside a text
    WITHIN = 1  # likewise, and kept while there is room: another text may branch off there
    GONE_ON = 2  # a request has gone on behind it, and the next will behind that one's end
    PROMPT = 3  # of a prompt: the next goes on there if it leaves the answer out, or answers again
    ANSWER = 4
    BRANCH = 5  # several have gone on there, or would have; or a client marked it


CHANCES = (0.0, 0.05, 0.05, 0.1, 0.2, 0.3)  # by kind, that a request goes on before the end is half as old again


class Worth:
    """What ends are worth, by kind and age: how many requests go on there for each one that comes, over the time for
    which that is most."""

    def __init__(self, forget: int) -> None:
        """``forget``: after as many ends of a kind, those before count half."""
        self._forget = forget
        shape = (len(End), NUM_AGES)
        self._gone_on = np.zeros(shape)  # by kind and age
        self._ended = np.zeros(shape)  # likewise, those that were evicted too
        self._table = self._densities()  # by kind and age
        self._num_new = 0  # ends since that was made

    def gone_on(self, kind: End, age: int, *, num_parts: int) -> None:
        """Count a request that goes on behind an end of ``num_parts`` that has waited for ``age`` requests."""
        at = _of(np.full(num_parts, age))
        self._gone_on[kind, at[0]] += num_parts
        self._left(np.full(num_parts, kind), at)

    def evicted(self, kinds: npt.NDArray[np.int8], ages: Ages) -> None:
        """Count ends that are kept no longer."""
        self._left(kinds, _of(ages))

    def of(self, kinds: npt.NDArray[np.int8], ages: Ages) -> npt.NDArray[np.float64]:
        """Return what ends [n] are worth."""
        if self._num_new >= max(SOME, self._forget // SOME):
            self._table, self._num_new = self._densities(), 0
        found: npt.NDArray[np.float64] = self._table[kinds, _of(ages)]
        return found

    def _left(self, kinds: npt.NDArray[np.int8], at: Ages) -> None:
        np.add.at(self._ended, (kinds, at), 1)
        for kind in np.flatnonzero(self._ended.sum(axis=1) > self._forget):
            self._gone_on[kind] /= 2
            self._ended[kind] /= 2
        self._num_new += len(at)

    def _densities(self) -> npt.NDArray[np.float64]:
        """Count, for each kind and age, the hits to come in a time by what that is, and take the best time."""
        reached = self._ended[:, ::-1].cumsum(axis=1)[:, ::-1]
        chance = (self._gone_on + PRIOR * np.array(CHANCES)[:, None] / PER_OCTAVE) / (reached + PRIOR)
        chance, lasts = np.minimum(chance, 1.0), np.diff(2.0 ** (np.arange(NUM_AGES + 1) / PER_OCTAVE))
        best = np.zeros((len(End), NUM_AGES))
        for age in range(NUM_AGES):
            stays = np.cumprod(1 - chance[:, age:], axis=1)  # of those that reach it, to each end from there
            waits = np.concatenate([np.ones((len(End), 1)), stays[:, :-1]], axis=1) * lasts[age:]
            best[:, age] = ((1 - stays) / waits.cumsum(axis=1)).max(axis=1)
        return best


def _of(ages: Ages) -> Ages:
    """Return the number of each age's bounds."""
    return np.minimum((np.log2(ages + 1) * PER_OCTAVE).astype(np.int64), NUM_AGES - 1)
