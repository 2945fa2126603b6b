"""What a step made of its requests: computed tokens counted, pages to the tree, new tokens to their requests.

Owns:      nothing; moves requests from prefill to the running batch or away to their receiver.
Never:     chooses what runs.
Invariant: a request of the step gets at most one token; the tokens come in the order of the plan's rows.
Thread:    scheduler thread only.
"""

from collections.abc import Callable

from replicas.cache.kv import KvCache
from replicas.request import Req, ReqState
from replicas.scheduler.decode import RunningBatch
from replicas.scheduler.legs import Legs
from replicas.scheduler.plan import BROKEN, ExtendPlan, StepPlan, StepResult
from replicas.scheduler.tokens import BROKEN_LOGITS, Counters, NewToken, stop_reason
from replicas.types import Finish, FinishReason, TokenLogprob


class Outcome:
    """Of all steps of one scheduler."""

    def __init__(
        self,
        kv: KvCache,
        running: RunningBatch,
        legs: Legs,
        counters: Counters,
        *,
        finish: Callable[[Req, Finish], None],
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._running = running
        self._legs = legs
        self._counters = counters
        self._finish = finish
        self._clock = clock

    def take(self, plan: StepPlan, result: StepResult, reqs: list[Req]) -> list[NewToken]:
        """``reqs`` [B] are those of the plan's rows, in order: prompts first, then who decodes. One that has ended
        since the step was made gets nothing of it."""
        num_prompts, sampled = 0, []
        if isinstance(plan, ExtendPlan):
            num_prompts = len(reqs) - plan.num_decode
            sampled = self._take_prompts(plan, result, reqs[:num_prompts])
        for req in reqs[num_prompts:]:
            if req.finish is None:
                req.computed_len += 1
                self._counters.decode_tokens += 1
        sampled += reqs[num_prompts:]
        logprobs = result.logprobs or (None,) * len(sampled)
        return [
            self.take_token(req, token, logprob)
            for req, token, logprob in zip(sampled, result.token_ids.tolist(), logprobs, strict=True)
            if req.finish is None
        ]

    def take_token(self, req: Req, token_id: int, logprob: TokenLogprob | None) -> NewToken:
        """The next token of ``req``, made here or elsewhere; ends it where that is its last."""
        if req.first_token_s is None:
            req.first_token_s = self._clock()
        if req.max_remaining <= 0:
            self._finish(req, Finish(reason=FinishReason.LENGTH))
            return NewToken(req, None, None)
        if token_id == BROKEN:
            self._finish(req, Finish(reason=FinishReason.ERROR, message=BROKEN_LOGITS, http_status=500))
            return NewToken(req, None, None)
        if req.state is ReqState.HANDING_OFF:
            return NewToken(req, token_id, logprob)  # the receiver's to take
        req.append(token_id)
        finish = stop_reason(req)
        if finish is not None:
            self._finish(req, finish)
        return NewToken(req, token_id, logprob)

    def _take_prompts(self, plan: ExtendPlan, result: StepResult, reqs: list[Req]) -> list[Req]:
        """``reqs`` are those of the first rows. Returns: whose token was sampled, ended since or not."""
        sampled = []
        for index, (req, row) in enumerate(zip(reqs, plan.rows, strict=False)):
            if row.sample:
                sampled.append(req)
            if req.finish is not None:
                continue
            req.computed_len += len(row.token_ids)
            req.prompt_logprobs += result.prompt_logprobs.get(index, ())
            self._kv.commit(req)
            self._counters.prefill_tokens += len(row.token_ids)
            if not row.sample:
                continue
            req.prompt_logprobs_from = None  # all made; a retracted request need not make them again
            if req.is_prefill_leg:
                req.move(ReqState.HANDING_OFF)
                self._legs.away.add(req)
            else:
                req.move(ReqState.RUNNING)
                self._running.add(req)
        return sampled
