"""Observer: reports one engine's KV transfers and steps to kvtransfer/replay/observe.py (SPEC J01, J03, J04).

Owns:      nothing; reads requests, table and pool.
Never:     changes anything, ends a step (`observe.harmless`), or runs unless `observe.enabled()`: its callers ask
           first.
Thread:    engine thread only.
"""

from collections.abc import Sequence

from kvtransfer.replay import observe
from kvtransfer.replay.payload import KvBytes, PayloadMeta
from replicas.cache.kv import KvCache
from replicas.request import Req
from replicas.scheduler.plan import DecodePlan, StepPlan
from replicas.scheduler.tokens import NewToken


class Observer:
    """The observation points of one engine. Without ``kv_bytes`` there are no hashes, so J01 and J03 are left out."""

    def __init__(self, kv: KvCache, kv_bytes: KvBytes | None) -> None:
        self._kv = kv
        self._kv_bytes = kv_bytes

    @observe.harmless
    def before_send(self, req: Req, first: int) -> None:
        """Report J01: K/V of tokens [first, num_tokens) of ``req`` is computed, and is or was sent to its receiver."""
        if self._kv_bytes is not None:
            meta = self._meta(self._kv_bytes, req, first)
            observe.prefill_before_send(meta, self._kv_bytes.read(meta.slots))

    @observe.harmless
    def after_restore(self, req: Req, first: int) -> None:
        """Report J03: K/V of tokens [first, num_tokens) of ``req`` arrived. Call it before the cache swaps any page."""
        if self._kv_bytes is not None:
            meta = self._meta(self._kv_bytes, req, first)
            row = self._kv.slots_of(req, 0, req.num_tokens)
            observe.decode_after_restore(meta, self._kv_bytes.read(meta.slots), table_row=row)

    @observe.harmless
    def after_step(self, plan: StepPlan, tokens: Sequence[NewToken]) -> None:
        """Report J04 for each decode row; ``tokens`` are in the order of the plan's rows, decode rows last.

        A step planned ahead, before the observers were turned on, is not reported: its plan does not say what it read,
        and a request that has ended since has a row in it and no token.
        """
        if isinstance(plan, DecodePlan):
            if plan.follows is not None:
                return
            inputs = list(zip(plan.token_ids.tolist(), plan.slots.tolist(), strict=True))
            runs = [[inputs[row] for row in plan.rows_of(request)] for request in range(plan.num_requests)]
        else:
            rows = plan.rows[len(plan.rows) - plan.num_decode :]
            runs = [[(int(row.token_ids[0]), int(row.slots[0]))] for row in rows]
        for token, run in zip(tokens[len(tokens) - len(runs) :], runs, strict=True):
            if token.token_id is None:
                continue
            made = [token.token_id, *(token_id for token_id, _ in token.more)]
            finish = _end(token.req)
            for number, (next_token, (last, slot)) in enumerate(zip(made, run, strict=False)):
                observe.decode_step(
                    rid=token.req.rid,
                    index=token.req.index,
                    i=token.req.num_output - len(made) + number,
                    last_token=last,
                    next_token=next_token,
                    slot=slot,
                    finish=finish if number == min(len(made), len(run)) - 1 else None,
                )

    def _meta(self, kv_bytes: KvBytes, req: Req, first: int) -> PayloadMeta:
        assert req.holding is not None, f"request {req.rid} holds nothing"
        return PayloadMeta(
            rid=req.rid,
            layout=kv_bytes.layout,
            prompt_len=req.prompt_len,
            cached_prefix_len=req.cached_tokens,
            token_range=(first, req.num_tokens),
            row=req.holding.row,
            slots=self._kv.slots_of(req, first, req.num_tokens),
        )


def _end(req: Req) -> str | None:
    """Name the end of ``req``: eos, stop_id, stop_string, or the reason where no token and no text was matched."""
    finish = req.finish
    if finish is None:
        return None
    if isinstance(finish.matched, str):
        return "stop_string"
    if finish.matched is not None:
        return "eos" if finish.matched in req.eos_ids else "stop_id"
    return finish.reason.value
