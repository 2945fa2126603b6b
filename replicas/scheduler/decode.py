"""The running batch: requests that make one token a step, and who gives way when the pool is full.

Owns:      the running requests.
Invariant: every request in it is RUNNING and lacks exactly one token's K/V: that of its last token.
Thread:    scheduler thread only.
"""

from collections.abc import Iterator

import numpy as np

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqState
from replicas.scheduler.plan import DecodePlan, SampleRow, TableWrite


class RunningBatch:
    """Requests in decode, in the order in which they joined."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
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

    def prepare(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take a slot for each request's last token (SPEC F10).

        Returns: rows, token_ids, seq_lens, slots, each [B] int32.
        """
        slots = self._kv.extend_decode(self.reqs)
        size = len(self.reqs)
        rows = np.empty(size, dtype=np.int32)
        token_ids = np.empty(size, dtype=np.int32)
        seq_lens = np.empty(size, dtype=np.int32)
        for i, req in enumerate(self.reqs):
            assert req.holding is not None
            assert req.extend_len == 1
            rows[i], token_ids[i], seq_lens[i] = req.holding.row, req.ids[req.num_tokens - 1], req.num_tokens
        return rows, token_ids, seq_lens, slots

    def plan(self, table_writes: tuple[TableWrite, ...], arrays: tuple[np.ndarray, ...]) -> DecodePlan:
        rows, token_ids, seq_lens, slots = arrays
        return DecodePlan(
            table_writes=table_writes,
            rows=rows,
            token_ids=token_ids,
            seq_lens=seq_lens,
            slots=slots,
            sampling=tuple(sample_row(req) for req in self.reqs),
        )

    def check(self) -> None:
        for req in self.reqs:
            assert req.state is ReqState.RUNNING, f"{req.rid} is {req.state}"
            assert req.extend_len == 1, f"{req.rid} lacks the K/V of {req.extend_len} tokens"


def sample_row(req: Req) -> SampleRow:
    """What the sampler needs to choose the next token of ``req``."""
    return SampleRow(
        params=req.sampling,
        position=req.num_tokens,
        num_output=req.num_output,
        stop_ids=req.stop_ids,
        prompt_ids=req.ids[: req.prompt_len],
        output_ids=req.output_ids,
        return_logprobs=req.return_logprobs,
        top_logprobs=req.top_logprobs,
    )
