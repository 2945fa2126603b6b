"""Fetches: whether a replica gets pages of a prompt from another one, which is quicker than computing them there.

Pure, but for the books of what links have shown. For each pair of a receiver and a donor, in seconds:

    fetched   FIXED_S, the donor's step in progress, its host pages loaded, what was asked of both links before, and the
              bytes over the pair's measured rate. All of that passes while the receiver's queue is computed: only what
              is longer delays the request
    others    the donor's running requests are slower by SLOWED meanwhile; those that wait at the receiver wait for what
              is computed there
              In a full pool the copies push out pages, of which the share `reused` would have been found again
    computed  the tokens that the receiver lacks, over its prefill rate, or loaded from its store

Only pages that a donor's events have confirmed count, on its device or its host. A link that fails, or takes longer
than computing would, is left alone for a while; one that was slow is tried again as time passes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from routing.types import Floats, Ints, LoadEstimate, PageFetch

FIXED_S = 0.02  # the receiver's grant, its order to the donor, the donor's answer: events between two steps
SLOWED = 0.05  # by which share the donor's steps are longer while it sends: the aim (docs/log/2026-11-29-fetches.md)
GAIN = 0.1  # estimates are wrong: so much of what computing costs must be won, and GAIN_S
GAIN_S = 0.005
MOST_DONORS = 4  # that are compared: those with most of the prompt, of equals those that were asked for least
LATE = 1.5  # times as long as expected, or as the queue, is too late; but not within
LEAST_WITHIN_S = 0.5  # that a fetch may take in any case
TRIED = 0.25  # as may this part of what computing takes


class BytesAsked:
    """The bytes of the fetches that are under way, by donor and by receiver."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self._open: dict[int, tuple[tuple[str, str], int]] = {}  # by decision number

    def begin(self, number: int, fetch: PageFetch, receiver: str) -> None:
        self._open[number] = (fetch.donor_id, receiver), fetch.num_bytes
        self.of.update(dict.fromkeys((fetch.donor_id, receiver), fetch.num_bytes))

    def end(self, number: int) -> None:
        """Close the fetch of decision ``number``, if it is open."""
        replicas, num_bytes = self._open.pop(number, ((), 0))
        self.of -= Counter(dict.fromkeys(replicas, num_bytes))

    def check(self) -> None:
        """Raises AssertionError if a sum is not that of the open fetches."""
        total: Counter[str] = Counter()
        for replicas, num_bytes in self._open.values():
            total.update(dict.fromkeys(replicas, num_bytes))
        assert total == self.of, f"{self.of} bytes are asked for, {total} are open"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Donors:
    """Replicas that could send pages of a prompt."""

    ids: Sequence[str]  # [m]
    itself: npt.NDArray[np.bool_]  # [n, m] whether it is the candidate
    device_tokens: Ints  # [m] of the prompt, in whole pages
    tokens: Ints  # [m] with those on the host
    host_s_per_token: Floats  # [m] to load one from there
    wait_s: Floats  # [m] until the step in progress ends
    num_running: Floats  # [m] requests that are slower meanwhile
    bytes_per_s: Floats  # [n, m] from each to each candidate; 0: not at all
    asked_bytes: Floats  # [n, m] on the way already, on the longer one of the two links


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetches:
    """What each candidate [n] would fetch; 0 tokens: computing is quicker."""

    donor_ids: Sequence[str]  # [m]
    donor: Ints  # [n] position in ``donor_ids``
    tokens: Ints
    num_bytes: Ints
    took_s: Floats  # from the order to the last page
    others_s: Floats  # what it costs the donor's requests
    compute_s: Floats  # to compute those tokens, or load them

    def without(self, at: npt.NDArray[np.bool_]) -> "Fetches":
        """Return these, but none for the candidates ``at``."""
        tokens, took_s, others_s = self.tokens.copy(), self.took_s.copy(), self.others_s.copy()
        tokens[at], took_s[at], others_s[at] = 0, 0.0, 0.0
        return replace(self, tokens=tokens, took_s=took_s, others_s=others_s)


def quickest(
    donors: Donors,
    load: LoadEstimate[Floats],
    *,
    num_tokens: int,
    base_tokens: Ints,
    store_tokens: Ints,
    store_s: Floats,
    sent_bytes: Floats,
    reused: float,
) -> Fetches:
    """Return from where each candidate would fetch, if that is worth it.

    Args: base_tokens: [n] that it has on its device and host. store_tokens, store_s: [n] that it would read from its
          store instead, and how long that takes. sent_bytes: [2, n] K and V of a token, 0: it fetches nothing; and of
          a window or states, which go with the last one.
          reused: the share of prompt tokens that are found in caches.
    """
    tokens = np.maximum(donors.tokens - base_tokens[:, None], 0)  # [n, m]
    tokens[donors.itself] = 0
    token_bytes, border_bytes = sent_bytes
    tokens[token_bytes == 0] = 0
    tokens[donors.bytes_per_s == 0] = 0
    rate = np.where(donors.bytes_per_s > 0, donors.bytes_per_s, 1.0)
    on_host = np.maximum(donors.tokens - np.maximum(donors.device_tokens, base_tokens[:, None]), 0)
    num_bytes = tokens * token_bytes[:, None] + np.where(tokens > 0, border_bytes[:, None], 0.0)
    took_s = FIXED_S + donors.wait_s + on_host * donors.host_s_per_token + (num_bytes + donors.asked_bytes) / rate
    others_s = SLOWED * num_bytes / rate * donors.num_running
    lacking = num_tokens - base_tokens
    each_s = (1.0 + load.num_waiting) / load.prefill_tokens_per_s  # what a token costs that is computed
    queue_s = (load.queued_tokens - load.late_tokens) / load.prefill_tokens_per_s
    later_s = np.maximum(took_s - queue_s[:, None], 0.0)
    fetched = later_s + (lacking[:, None] - tokens) * each_s[:, None] + others_s
    computed = (lacking - store_tokens) * each_s + store_s
    best = np.where(tokens > 0, fetched, np.inf).argmin(axis=1)
    row = np.arange(len(best))
    copies = np.where(load.free_tokens < tokens[row, best], tokens[row, best], 0)
    worth = (tokens[row, best] > 0) & (fetched[row, best] < computed - np.maximum(GAIN * computed, GAIN_S))
    return Fetches(
        donor_ids=donors.ids,
        donor=best,
        tokens=np.where(worth, tokens[row, best], 0),
        num_bytes=np.where(worth, num_bytes[row, best], 0).astype(np.int64),
        took_s=np.where(worth, took_s[row, best], 0.0),
        others_s=np.where(worth, others_s[row, best] + reused * copies * each_s, 0.0),
        compute_s=tokens[row, best] / load.prefill_tokens_per_s,
    )
