"""Drafts for tests in which it is known what requests will answer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from replicas.engine.engine import Engine
from replicas.request import Req
from replicas.scheduler.rounds import Feature
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.speculation import GuessKind, Proposal, Speculation


def put_drafts(scheduler: Scheduler, drafts: Feature | None) -> Feature | None:
    """Let ``scheduler`` have ``drafts`` from now on; None: none. Returns: those that it had."""
    before = scheduler.features.pop("speculation", None)
    if drafts is not None:
        scheduler.features["speculation"] = drafts
    return before


class Told(Speculation):
    """Drafts out of answers that are known, every sixth token of them wrong; all that fit into a step are tried."""

    def __init__(self, engine: Engine, known: Mapping[tuple[str, int], list[int]], length: int = 7) -> None:
        super().__init__(engine.kv, engine.scheduler.counters, step_s={}, clock=lambda: 0.0)
        self._known, self._length, self._vocab_size = known, length, engine.config.model.vocab_size

    def _propose(self, req: Req) -> Proposal | None:
        at, most = req.num_output, min(self._length, req.max_remaining - 1)
        ids = np.array(self._known.get((req.rid, req.index), [])[at : at + max(most, 0)], dtype=np.int32)
        wrong = np.arange(at, at + len(ids)) % 6 == 5
        ids[wrong] = (ids[wrong] + 1) % self._vocab_size
        return Proposal(GuessKind("text", 8), ids) if len(ids) else None

    def _chosen(self, reqs: Any, num_rows: int) -> list[np.ndarray]:
        drafts = [self._proposed[req].token_ids if req in self._proposed else np.empty(0, np.int32) for req in reqs]
        left = num_rows - np.cumsum([0, *map(len, drafts)])
        return [ids[: max(0, most)] for ids, most in zip(drafts, left, strict=False)]
