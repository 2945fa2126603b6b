"""The running batch: requests that make one token a step, and who gives way when the pool is full.

Owns:      the running requests.
Invariant: every request in it is RUNNING and lacks exactly one token's K/V: that of its last token.
Thread:    scheduler thread only.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqState
from replicas.scheduler.plan import DecodePlan, PrefixGroup, SampleRow, TableWrite
from replicas.scheduler.shared import SharedPrefixes


class RunningBatch:
    """Requests in decode, in the order in which they joined."""

    def __init__(self, kv: KvCache, *, cascade: bool, cascade_saves: int) -> None:
        """``cascade_saves``: tokens a step that a prefix group must save reading."""
        self._kv = kv
        self._shared = SharedPrefixes(min_saved=cascade_saves) if cascade else None
        self.reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self.reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self.reqs)

    def add(self, req: Req) -> None:
        assert req.state is ReqState.RUNNING
        self.reqs.append(req)

    def remove(self, req: Req) -> None:
        self.reqs.remove(req)

    def short_of_pages(self) -> bool:
        """True when the next step needs more pages than are free or evictable."""
        return self._kv.pages_needed_decode(self.reqs) * self._kv.page_size > self._kv.available_tokens()

    def victim(self) -> Req:
        """Who gives way first: lowest priority, least output, longest prompt (SPEC F11)."""
        return min(self.reqs, key=lambda req: (req.priority, req.num_output, -req.prompt_len))

    def prepare(
        self, reqs: Sequence[Req], *, ahead: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take a slot for the last token of each of ``reqs`` (SPEC F10); ``ahead``: for the one after it, which the
        step under way makes.

        Returns: rows, token_ids (0 where they are to come), seq_lens, slots, each [B] int32.
        """
        slots = self._kv.extend_decode(reqs)
        held = [req.holding for req in reqs if req.holding is not None]
        rows = np.array([holding.row for holding in held], dtype=np.int32)
        seq_lens = np.array([holding.kv_len for holding in held], dtype=np.int32)
        last = [0 if ahead else req.ids[req.num_tokens - 1] for req in reqs]
        return rows, np.array(last, dtype=np.int32), seq_lens, slots

    def prefix_groups(self, reqs: Sequence[Req], *, first: int = 0) -> tuple[PrefixGroup, ...]:
        """Who of ``reqs``, the first of which is the step's row ``first``, begin with the same pages."""
        return () if self._shared is None else self._shared.groups(reqs, first=first)

    def plan(
        self,
        reqs: Sequence[Req],
        table_writes: tuple[TableWrite, ...],
        arrays: tuple[np.ndarray, ...],
        *,
        follows: npt.NDArray[np.int32] | None = None,
    ) -> DecodePlan:
        """A decode step of ``reqs``, from what `prepare` returned; ``follows``: it was prepared ahead."""
        rows, token_ids, seq_lens, slots = arrays
        return DecodePlan(
            table_writes=table_writes,
            rows=rows,
            token_ids=token_ids,
            seq_lens=seq_lens,
            slots=slots,
            sampling=tuple(sample_row(req, num_ahead=0 if follows is None else 1) for req in reqs),
            prefix_groups=self.prefix_groups(reqs),
            follows=follows,
        )

    def check(self) -> None:
        for req in self.reqs:
            assert req.state is ReqState.RUNNING, f"{req.rid} is {req.state}"
            assert req.extend_len == 1, f"{req.rid} lacks the K/V of {req.extend_len} tokens"


def sample_row(req: Req, num_ahead: int = 0) -> SampleRow:
    """What the sampler needs to choose the next token of ``req``, or the one ``num_ahead`` after it."""
    num_tokens, prompt_len, ids = req.num_tokens, req.prompt_len, req.ids
    return SampleRow(
        req.sampling,
        num_tokens + num_ahead,
        num_tokens - prompt_len + num_ahead,
        req.stop_ids,
        ids[:prompt_len],
        ids[prompt_len:num_tokens],
        req.return_logprobs,
        req.top_logprobs,
    )
