"""What a step made of a request: its new token, why it ended, and the counts of all of them.

Owns:      nothing; values, and the rule by which a token ends a request.
"""

from dataclasses import dataclass
from typing import NamedTuple

from replicas.request import Req
from replicas.types import Finish, FinishReason, TokenLogprob

BROKEN_LOGITS = (
    "no token can be chosen: the logits hold NaN or inf, or all are masked out. The weights are broken, activations "
    "overflow their dtype (try float32 or bfloat16), or the penalties are extreme"
)


class NewToken(NamedTuple):
    """One sampled token of one request; ``req.finish`` is set when it was its last."""

    req: Req
    token_id: int | None  # None: no output was wanted, its logits are broken, or only a hand-off is to be told of
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Counters:
    """What the scheduler counted since it started; only grows."""

    finished: int = 0
    aborted: int = 0
    errors: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    lookup_tokens: int = 0
    decode_tokens: int = 0

    def count_end(self, reason: FinishReason) -> None:
        match reason:
            case FinishReason.ABORT:
                self.aborted += 1
            case FinishReason.ERROR:
                self.errors += 1
            case _:
                self.finished += 1


def stop_reason(req: Req) -> Finish | None:
    """Whether the last token of ``req`` ends it by id or by length; stop strings are the detokenizer's."""
    num_output, stop_ids = req.num_output, req.stop_ids
    if stop_ids and num_output >= max(1, req.sampling.min_new_tokens):
        last = int(req.ids[req.num_tokens - 1])
        if last in stop_ids:
            return Finish(reason=FinishReason.STOP, matched=last)
    if num_output >= req.sampling.max_new_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
