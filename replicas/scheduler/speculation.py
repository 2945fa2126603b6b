"""Speculation: drafts the next tokens of a request from text at hand, and decides when a step that verifies them pays.

Owns:      how often guesses came true, by request and by kind; what a further row of a step costs; the proposals of the
           step under way, and the rows that try them.
Never:     changes an answer: a row of a draft is the decode row of that position, and a token that was guessed wrong
           ends its run (scheduler/tokens.py). Takes memory from a prompt: drafts stand in steps that only decode.
Invariant: a step with drafts has fewer than MOST_ROWS rows.
Thread:    scheduler thread only.
Source:    prompt lookup decoding (Saxena 2023); SuffixDecoding, Oliaro et al. 2024 (arXiv:2411.04975); verification as
           in Leviathan et al. 2023 (arXiv:2211.17192), where the draw is a function of seed, position and logits.

    plan: propose, by request ─> the rows with the most tokens to expect per cost ─> step ─> applied: what came true

A request's guesses go on as an answer did that the cache keeps behind all its tokens; else as its own text did behind
the longest suffix that it has twice. What a grammar forces needs no guess: a draft ends so that it is taken, and
computed, as without drafts (tokens.take_forced); and before a guess that the grammar does not allow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replicas.cache.kv import KvCache
from replicas.request import Guide, Req
from replicas.scheduler.decode import DecodeRows, decode_plan, draft_groups, sample_row, table_writes
from replicas.scheduler.plan import DecodePlan, PrefixGroup, SampleRow, StepPlan
from replicas.scheduler.rounds import Feature
from replicas.scheduler.tokens import SOURCES, Counters, NewToken, require_fault
from replicas.types import TokenIds

MIN_MATCH, MAX_MATCH = 3, 8  # tokens of the suffix that a guess follows; longer matches are as good as the longest
MOST_ROWS = 64  # of a step: what more cost is not estimated
LEAST_GAIN = 1.02  # tokens for the cost, over those of a step without drafts: below that the estimate may err
MEMORY = 0.95  # weight of what came true before, at each further guess: about the last twenty count
PRIOR = 2.0  # guesses' worth of the kind's share in a request's
LEAST_COST, MOST_COST = 0.02, 1.0  # of a further row, over a step: also of one that was free at start
SMOOTHING = 0.2  # weight of the newest step in what rows cost
STEPS_TO_PLAIN = 32  # with drafts, until one without tells again what that costs
MANY = 8  # requests, where to look for guesses takes time that shows
SELDOM = 4  # after twice as many steps in which nothing was tried, each so many-th step of MANY looks for guesses
PROBE = 16  # and where steps overlap, each so many-th waits for the tokens that guesses would follow


class HitShare(NamedTuple):
    """The share of recent guesses that came true, those before each in its draft given."""

    right: float = 1.0
    tried: float = 2.0

    def after(self, right: int, tried: int) -> "HitShare":
        """Return the share when ``right`` of ``tried`` more guesses came true."""
        kept = MEMORY**tried
        return HitShare(self.right * kept + right, self.tried * kept + tried)

    def beside(self, other: "HitShare") -> float:
        """Estimate the next guess, where ``other`` is all that is known beside these."""
        return (self.right + PRIOR * other.right / other.tried) / (self.tried + PRIOR)


class GuessKind(NamedTuple):
    """What a guess rests on."""

    source: str  # of tokens.SOURCES
    match_len: int  # tokens that it follows, up to MAX_MATCH: of the answer, where the cache kept one to all before it


class Proposal(NamedTuple):
    """A draft of one request."""

    kind: GuessKind
    token_ids: TokenIds  # [k], k >= 1


class RowCost:
    """What further rows of a decode step cost, in steps without them: measured at start, and kept current."""

    def __init__(self, step_s: Mapping[int, float]) -> None:
        """``step_s``: seconds of a step, by its rows; none where nothing was measured: rows are then nearly free."""
        sizes = sorted(step_s) or [1]
        times = np.maximum.accumulate([step_s.get(size, 1.0) for size in sizes])
        if len(sizes) > 1:  # the last rows cost what those before them do
            end_s = times[-1] + (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * (MOST_ROWS - sizes[-1])
            sizes, times = [*sizes, MOST_ROWS], np.append(times, end_s)
        self._start_s = np.interp(np.arange(MOST_ROWS + 1), sizes, times)
        self._plain_s = 0.0  # smoothed, of steps without drafts over what they took at start; 0 until one was timed
        # of what further rows cost over what they did at start, by how many bits the number of requests has: beside few
        # rows are nearly free, so that a little more is many times as much
        self._factors = [1.0] * (MOST_ROWS.bit_length() + 1)
        self._num_plain = 0  # requests of the last step without drafts
        self._num_drafted = 0  # steps since

    def known(self, num_requests: int) -> bool:
        """Whether a step without drafts has told lately what one of ``num_requests`` takes."""
        return self._num_plain == num_requests and self._num_drafted < STEPS_TO_PLAIN

    def of(self, num_requests: int, num_rows: int) -> npt.NDArray[np.float64]:
        """Return what steps with 1 .. ``num_rows`` further rows cost, over one of ``num_requests`` alone."""
        return 1.0 + self._factors[num_requests.bit_length()] * self._more(num_requests, num_rows)

    def timed(self, num_requests: int, num_rows: int, step_s: float) -> None:
        """Take in the time of a step of ``num_requests``, with ``num_rows`` further rows."""
        if num_requests + num_rows > MOST_ROWS:
            return
        taken, bits = step_s / float(self._start_s[num_requests]), num_requests.bit_length()
        if not num_rows:
            self._plain_s = taken if not self.known(num_requests) else _smooth(self._plain_s, taken)
            self._num_plain, self._num_drafted = num_requests, 0
            # a step that was held up is forgotten
            self._factors[bits] += SMOOTHING / STEPS_TO_PLAIN * (1.0 - self._factors[bits])
        elif self._plain_s:
            self._num_drafted += 1
            cost = taken / self._plain_s - 1.0
            factor = min(max(cost / float(self._more(num_requests, num_rows)[-1]), 0.0), MOST_COST / LEAST_COST)
            self._factors[bits] = _smooth(self._factors[bits], factor)

    def _more(self, num_requests: int, num_rows: int) -> npt.NDArray[np.float64]:
        steps_s = self._start_s[num_requests : num_requests + num_rows + 1]
        least = LEAST_COST * np.arange(1, num_rows + 1)
        more: npt.NDArray[np.float64] = np.maximum(steps_s[1:] / steps_s[0] - 1.0, least)
        return more


class Speculation(Feature):
    """The drafts of one engine's requests, and which of them each step tries."""

    def __init__(
        self,
        kv: KvCache,
        counters: Counters,
        *,
        step_s: Mapping[int, float],
        clock: Callable[[], float],
    ) -> None:
        """``step_s``: seconds of a decode step, by its rows."""
        self.cost = RowCost(step_s)
        self._kv = kv
        self._counters = counters
        self._clock = clock
        self._began_s = self._ended_s = clock()
        self._num_untried = 0  # steps since one with drafts
        self._of_reqs: dict[tuple[Req, str], HitShare] = {}  # by source, of open requests that had a proposal
        self._of_kinds: dict[GuessKind, HitShare] = {}
        self._proposed: dict[Req, Proposal] = {}  # for the step under way, whether a row tries them or not

    def plan(
        self, reqs: Sequence[Req], rows: DecodeRows, groups: tuple[PrefixGroup, ...], *, min_saved: int | None
    ) -> DecodePlan:
        """Plan a decode step of ``reqs``; drafts get rows behind their ``rows``."""
        rows, draft_rows, of_drafts = self.place(reqs, rows)
        if draft_rows and min_saved is not None:
            page_size = self._kv.page_size
            groups = draft_groups(groups, draft_rows, rows.seq_lens, page_size=page_size, min_saved=min_saved)
        writes = table_writes(self._kv)
        return decode_plan(reqs, rows, writes, groups, draft_rows=draft_rows, of_drafts=of_drafts)

    def place(self, reqs: Sequence[Req], rows: DecodeRows) -> tuple[DecodeRows, tuple[range, ...], list[SampleRow]]:
        """Choose what the next step of ``reqs`` tries. Returns: the rows of the step, those of drafts behind their own
        ``rows``; which are whose, () if none has any; and what the sampler needs for these."""
        draft_rows, sampling = list[range](), list[SampleRow]()
        for request, token_ids in enumerate(self.choose(reqs)):
            req, first = reqs[request], len(rows.rows)
            places = None if req.guide is None else _along(req.guide, token_ids)
            num_allowed = len(token_ids) if places is None else len(places)
            if num_allowed and len(slots := self._kv.extend_draft(req, num_allowed)):
                req.ids[req.num_tokens : req.num_tokens + num_allowed] = token_ids[:num_allowed]
                rows = rows.and_draft(request, token_ids[:num_allowed], slots)
                for number in range(num_allowed):
                    guide = None if places is None else places[number]
                    sampling.append(sample_row(req, num_drafted=number + 1, guide=guide))
            draft_rows.append(range(first, len(rows.rows)))
        return rows, tuple(draft_rows), sampling

    def applied(self, plan: StepPlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        if isinstance(plan, DecodePlan):
            self._end_decode(plan, reqs, tokens)
        self._ended_s = self._clock()

    def _end_decode(self, plan: DecodePlan, reqs: Sequence[Req], tokens: Sequence[NewToken]) -> None:
        """Take back the slots of guesses that were wrong in the step of ``plan``, and note how good all were."""
        tried = {req: len(rows) for req, rows in zip(reqs, plan.draft_rows, strict=False) if rows}
        for req in tried:
            if req.finish is None:
                self._kv.cut(req)
        for token in tokens:
            self._counters["decode_tokens"] += token.num_accepted
        if plan.follows is not None:  # it was planned, and begun, while another was under way
            self._proposed, self._began_s = {}, self._ended_s
            self._num_untried += 1
        self.judge(len(reqs), tokens, tried)

    def needs_tokens(self, num_running: int) -> bool:
        """Whether the next step waits for the tokens before it so that it may have drafts: where it has room for any,
        and some were tried of late, and now and then."""
        due = self._num_untried < 2 * SELDOM or (self._num_untried + 1) % PROBE == 0  # one step more is under way
        return due and self._num_rows(num_running) > 0

    def choose(self, reqs: Sequence[Req]) -> list[TokenIds]:
        """Choose what the next step of ``reqs`` tries: [B] drafts, some empty; [] without any."""
        self._proposed, chosen = {}, list[TokenIds]()
        num_rows, began_s = self._num_rows(len(reqs)), self._clock()
        if num_rows > 0 and self._looks(len(reqs)) and self._gain(len(reqs), np.ones(num_rows))[1] >= LEAST_GAIN:
            self._proposed = {req: found for req in reqs if (found := self._propose(req)) is not None}
            if self._proposed and self.cost.known(len(reqs)):
                chosen = self._chosen(reqs, num_rows)
        self._num_untried = 0 if chosen else self._num_untried + 1
        self._began_s = began_s if chosen else self._clock()  # to choose is a part of what drafts cost
        return chosen

    def _num_rows(self, num_requests: int) -> int:
        """The rows that a step of ``num_requests`` has for drafts."""
        return MOST_ROWS - 1 - num_requests

    def _looks(self, num_requests: int) -> bool:
        """Whether to look for guesses: less often where that takes long and nothing was worth trying of late."""
        return num_requests < MANY or self._num_untried < 2 * SELDOM or self._num_untried % SELDOM == 0

    def judge(self, num_requests: int, tokens: Sequence[NewToken], tried: Mapping[Req, int]) -> None:
        """Compare what was proposed for the step that is over with its ``tokens``; ``tried``: rows, by request. A
        proposal that no row tried is judged by the one token that came, so that a source that was poor is noticed when
        it is good again."""
        self.cost.timed(num_requests, sum(tried.values()), self._clock() - self._began_s)
        for token in tokens:
            proposal = self._proposed.pop(token.req, None)
            if proposal is None or token.token_id is None:
                continue
            came = [token.token_id, *(token_id for token_id, _ in token.more)]
            pairs = list(zip(came, proposal.token_ids.tolist(), strict=False))
            right = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
            kind, num = proposal.kind, min(right + 1, len(pairs))
            self._of_reqs[token.req, kind.source] = self._own(token.req, kind.source).after(right, num)
            self._of_kinds[kind] = self._of_kinds.get(kind, HitShare()).after(right, num)
            num_tried, (drafted, accepted) = tried.get(token.req, 0), token.req.drafted
            token.req.drafted = drafted + num_tried, accepted + token.num_accepted
            self._counters[f"drafted_tokens.{proposal.kind.source}"] += num_tried
            self._counters[f"accepted_tokens.{proposal.kind.source}"] += token.num_accepted
            if token.req.finish is not None:
                self.ended(token.req)

    def ended(self, req: Req) -> None:
        for source in SOURCES:
            self._of_reqs.pop((req, source), None)

    def _propose(self, req: Req) -> Proposal | None:
        """Guess what follows the tokens of ``req``; None where nothing is at hand."""
        most = min(self._kv.longest_draft, req.max_remaining - 1)  # the token after a draft is drawn too
        if most < 1:
            return None
        kept = self._kv.kept_behind(req, most)
        if len(kept):
            return Proposal(GuessKind("tree", min(req.num_output, MAX_MATCH)), kept)
        ids = req.ids[: req.num_tokens]
        start, match_len = repeated_suffix(ids)
        if not match_len:
            return None
        return Proposal(GuessKind("text", match_len), np.resize(ids[start:], most))  # what repeats goes on repeating

    def _chosen(self, reqs: Sequence[Req], num_rows: int) -> list[TokenIds]:
        """Take the guesses that are likeliest to be reached and right, as many as pay."""
        places, chances = [], []
        for place, req in enumerate(reqs):
            if (proposal := self._proposed.get(req)) is not None:
                each = self._own(req, proposal.kind.source).beside(self._of_kinds.get(proposal.kind, HitShare()))
                length = len(proposal.token_ids)
                chances.append(min(each, 0.99) ** np.arange(1, length + 1))
                places.append(np.full(length, place))
        place_of, chance = np.concatenate(places), np.concatenate(chances)
        order = np.argsort(-chance, kind="stable")[:num_rows]
        best, gain = self._gain(len(reqs), chance[order])
        if gain < LEAST_GAIN:
            return []
        counts = np.bincount(place_of[order[: best + 1]], minlength=len(reqs))
        none = np.empty(0, dtype=np.int32)
        return [self._proposed[req].token_ids[:n] if n else none for req, n in zip(reqs, counts.tolist(), strict=True)]

    def _gain(self, num_requests: int, chances: npt.NDArray[np.float64]) -> tuple[int, float]:
        """Return after which of ``chances`` [n] a step makes the most tokens for its cost, and how many times as many
        as one without drafts."""
        tokens = 1.0 + chances.cumsum() / num_requests
        gains = tokens / self.cost.of(num_requests, len(chances))
        best = int(gains.argmax())
        return best, float(gains[best])

    def _own(self, req: Req, source: str) -> HitShare:
        return self._of_reqs.get((req, source), HitShare(0.0, 0.0))


def _along(guide: Guide, token_ids: TokenIds) -> Sequence[Guide]:
    """Return as `Guide.along`; nothing is guessed where that raises: the next token shows what is wrong."""
    try:
        return guide.along(token_ids.tolist())
    except BaseException as error:  # noqa: BLE001
        require_fault(error)
        return ()


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)


def repeated_suffix(ids: TokenIds) -> tuple[int, int]:
    """Find where the longest suffix of ``ids`` stands before, at the last such place; a suffix has at least MIN_MATCH
    tokens, and counts up to MAX_MATCH. Returns: where that place goes on, and the suffix's length, or 0.

    Costs one comparison of all ids, and then of the places that are left.
    """
    length, places = 0, np.flatnonzero(ids[:-1] == ids[-1])
    for back in range(1, MAX_MATCH + 1):
        if not len(places):
            break
        length, found = back, places
        places = places[places >= back]
        places = places[ids[places - back] == ids[-1 - back]] if back < len(ids) else places[:0]
    return (int(found[-1]) + 1, length) if length >= MIN_MATCH else (0, 0)
