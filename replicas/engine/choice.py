"""The choices of open requests: tokens in, text and deltas out.

Owns:      each choice's detokenizer, what its caller has not received yet, and the index of open choices. A choice
           leaves the index with the delta that carries its finish.
Never:     ends a request, except for stop strings, which only text can show.
Invariant: every choice that is added gets exactly one delta with ``finish``.
Thread:    engine thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicas.request import Req, stage_times
from replicas.scheduler.tokens import NewToken, at_fault, stop_reason
from replicas.text.detokenizer import Detokenizer
from replicas.text.tokenizer import Tokenizer
from replicas.types import Finish, FinishReason, GenerateRequest, StageTimes, TokenDelta, TokenLogprob


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of an open request: its sequence and its text."""

    req: Req
    detokenizer: Detokenizer
    prompt_logprobs_due: tuple[TokenLogprob, ...] | None  # what precedes req.prompt_logprobs; None: nothing to send

    @staticmethod
    def make(
        request: GenerateRequest, index: int, *, tokenizer: Tokenizer, now_s: float, eos_ids: frozenset[int]
    ) -> "Choice":
        """Make choice ``index`` of ``request``, in state WAITING."""
        req = Req.make(request, index=index, now_s=now_s, eos_ids=eos_ids)
        detokenizer = Detokenizer.of(req.sampling, tokenizer)
        due: tuple[TokenLogprob, ...] | None = None
        if request.prompt_logprobs_from is not None:
            first = TokenLogprob(token_id=int(request.token_ids[0]), logprob=None)  # nothing precedes it
            due = (first,) if request.prompt_logprobs_from == 0 else ()
        return Choice(req=req, detokenizer=detokenizer, prompt_logprobs_due=due)

    def replay(self) -> Finish | None:
        """Take in the output that another replica delivered. Returns: why that completes the choice, if it does."""
        req = self.req
        if not req.num_resumed:
            return None
        finish = stop_reason(req)
        shown = req.output_ids[: self._num_shown(finish)]
        delivered = self.detokenizer.push([int(token) for token in shown])
        if delivered.matched_stop is not None:
            return Finish(reason=FinishReason.STOP, matched=delivered.matched_stop)
        return finish

    def push(self, token_id: int) -> tuple[str, Finish | None]:
        """Decode ``token_id``. Returns: the text that it adds, and the end if that completes a stop string."""
        shows = self._num_shown(self.req.finish) == self.req.num_output
        pushed = self.detokenizer.push([token_id] if shows else [])
        if pushed.matched_stop is None:
            return pushed.text, None
        return pushed.text, Finish(reason=FinishReason.STOP, matched=pushed.matched_stop)

    def push_run(self, token: NewToken) -> tuple[NewToken, str, Finish | None]:
        """Decode a token and those that came with it. Returns: the token with those up to the one that completes a stop
        string, their text, and the end if there is such a one."""
        assert token.token_id is not None
        ids, text = (token.token_id, *(token_id for token_id, _ in token.more)), ""
        num_shown = len(ids) - (self.req.num_output - self._num_shown(self.req.finish))
        for index, token_id in enumerate(ids[:num_shown]):
            pushed = self.detokenizer.push([token_id])
            text += pushed.text
            if pushed.matched_stop is not None:
                self.req.num_tokens -= len(ids) - 1 - index
                self.req.computed_len = min(self.req.computed_len, self.req.num_tokens - 1)
                finish = Finish(reason=FinishReason.STOP, matched=pushed.matched_stop)
                return token._replace(more=token.more[:index]), text, finish
        return token, text, None

    def delta(self, token: NewToken | None, text: str) -> TokenDelta:
        """Make the delta for the caller; the last one if the request has ended."""
        req = self.req
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if self.prompt_logprobs_due is not None and req.stamps.first_token_s is not None:
            prompt_logprobs = (*self.prompt_logprobs_due, *req.prompt_logprobs)
            self.prompt_logprobs_due = None
        if req.finish is not None and not isinstance(req.finish.matched, str):
            try:
                text += self.detokenizer.flush()
            except BaseException as error:  # noqa: BLE001
                req.finish = at_fault(req, error)
        report = None
        if req.leg is not None:
            report, req.leg.report = req.leg.report, None
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if token is not None and token.token_id is not None:
            token_ids = (token.token_id, *(token_id for token_id, _ in token.more))
            if token.logprob is not None:
                more = (logprob or _certain(token_id, req.top_logprobs) for token_id, logprob in token.more)
                logprobs = (token.logprob, *more)
        return TokenDelta(
            rid=req.rid,
            index=req.index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            usage=req.usage(),
            finish=req.finish,
            hand_off=report,
            stages=self._stages(begins=bool(token_ids) and req.num_output - req.num_resumed == len(token_ids)),
        )

    def _stages(self, *, begins: bool) -> StageTimes | None:
        """Return the stages for the last delta, and for that of the first token (``begins``), so that a router can
        tell queue from prefill while the request runs."""
        stamps, ended = self.req.stamps, self.req.finish is not None
        if not ended and not begins:
            return None
        stages = stage_times(self.req, stamps.ended_s if ended else stamps.first_token_s)
        return replace(stages, passed_s=stamps.passed_s) if stamps.passed_s else stages

    def _num_shown(self, finish: Finish | None) -> int:
        """Count the output tokens that become text; a stop token does not, unless the request includes stops."""
        by_id = finish is not None and isinstance(finish.matched, int)
        return self.req.num_output - (1 if by_id and not self.req.sampling.include_stop else 0)


def _certain(token_id: int, num_top: int) -> TokenLogprob:
    """Return the logprob of the only token allowed."""
    return TokenLogprob(token_id=token_id, logprob=0.0, top=((token_id, 0.0),) if num_top else ())


class OpenRequests:
    """The choices that have not ended, by request id and by sequence."""

    def __init__(self) -> None:
        self._choices: dict[str, list[Choice]] = {}  # all of each request of which one is open
        self.by_req: dict[Req, Choice] = {}  # the same choices, for a lookup per token

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, rid: str) -> bool:
        return rid in self._choices

    @property
    def rids(self) -> list[str]:
        return list(self._choices)

    def add(self, rid: str, choices: Sequence[Choice]) -> None:
        assert rid not in self._choices, f"request {rid} is open"
        self._choices[rid] = list(choices)
        self.by_req.update((choice.req, choice) for choice in choices)

    def choices(self, rid: str) -> list[Choice]:
        """List the open choices of a request; none if it is not open."""
        return [choice for choice in self._choices.get(rid, ()) if choice.req in self.by_req]

    def unadmitted(self, rid: str) -> list[Choice]:
        """List the open choices of a request none of which was ever admitted; none for any other request."""
        was_admitted = any(choice.req.was_admitted for choice in self._choices.get(rid, ()))
        return [] if was_admitted else self.choices(rid)

    def find(self, rid: str, index: int) -> Req | None:
        """Return choice ``index`` of an open request."""
        return next((choice.req for choice in self.choices(rid) if choice.req.index == index), None)

    def take_delta(self, choice: Choice, token: NewToken | None = None, text: str = "") -> TokenDelta:
        """Make the next delta of an open choice; a choice that has ended leaves with it."""
        delta = choice.delta(token, text)
        if delta.finish is not None:
            del self.by_req[choice.req]
            if not self.choices(choice.req.rid):
                del self._choices[choice.req.rid]
        return delta
