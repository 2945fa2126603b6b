"""Why a prompt was not cached: one cause for each answer that reused less than it could have.

To add a cause, give `MissCause` a member and `SAID` its words: counter, board, header and table are drawn from both.

Owns:      what this router remembers of prompts, as hashes: the last turns of conversations, under which names
           (salt, tenant, adapter) each prefix was sent, and which pages left which replica, when and for whom.
Never:     keeps a text or a token id; changes a decision.
Invariant: every book is bounded, the oldest entry out first. A cause is about the first page that was not cached. What
           is told to a client never says that another one sent the same prompt (`Miss.told`).
Thread:    the router's own.

    not cached ──> the part behind K and V is gone? another replica has it? it left a replica? ──> the tree's cause
               └─> the last turn of the conversation differs there? another name has it? ────────> the prompt's cause

A conversation is found by its session, by the last message of its last turn, or by system text and tools without
their time stamps and order. Several routers each know the turns that came to them, and all pages.
"""

import enum
import itertools
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import xxhash

from kvtransfer.pages import PageKeys, Tier
from routing.types import Decision, TokenIds

MOST_PAGES = 1 << 17  # that have left replicas: 14 MB
MOST_TURNS = 1 << 13  # names of turns, of which each has up to two
MOST_TURN_PAGES = 1 << 20  # in all turns: 8 MB
MOST_MESSAGES = 1 << 18  # in all turns: 40 MB
MOST_PREFIXES = 1 << 14
MOST_PARTS = 1 << 13
MOST_ROWS = 20_000  # of the table, by five minutes, tenant and cause
MOST_BACK = 8  # messages from the end among which the last one of the turn before is looked for
ROW_S = 300.0
SYSTEM = ("system", "developer")  # roles
# Characters of a text in which time stamps are looked for, of system texts and of others: a millisecond, 20 us
LONG_TEXT, HEAD = 1 << 12, 64
MOST_LOOKED_AT = 64  # pages, for how many of a prompt have left a replica
_DEPTHS = (1, 4, 16, 64, 256, 1024)  # pages of the prefixes that are remembered with their names
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d"
_DIGITS = re.compile(rf"\d(?:[-/.:]\d|\d{{8}})|day\b|{_MONTH}")  # what `_TIME` finds has one of these
_TIME = re.compile(
    r"\d{4}-\d\d?-\d\d?(?:[T ]\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|[+-]\d\d:?\d\d))?)?"
    r"|\d{1,2}[/.]\d{1,2}[/.]\d{2,4}|\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm])?|\b1\d{9}(?:\d{3})?\b"
    rf"|\b(?:\d{{1,2}} )?{_MONTH}\d{{0,3}}(?:,? \d{{4}})?"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)


class MissCause(enum.Enum):
    """Why the first page that was not cached was not."""

    CHANGED = "changed"
    REORDERED = "reordered"
    TIME_STAMP = "time_stamp"
    EVICTED = "evicted"
    ELSEWHERE = "elsewhere"
    SALT = "salt"
    TENANT = "tenant"
    ADAPTER = "adapter"
    PAGE = "page"
    PART = "part"
    RESTARTED = "restarted"
    NEVER = "never_seen"


SAID: Mapping[MissCause, str] = {
    MissCause.CHANGED: "the prompt changed at token {at}: {what} is not as in the turn before",
    MissCause.REORDERED: "the prompt changed at token {at}: {what} only changed its place since the turn before",
    MissCause.TIME_STAMP: "the prompt changed at token {at}: {what} differs from the turn before by a time stamp alone",
    MissCause.EVICTED: "it was evicted{by}",
    MissCause.ELSEWHERE: "{what} holds it, and it was not fetched from there{costs}",
    MissCause.SALT: "it is cached for another cache_salt",
    MissCause.TENANT: "it is cached for another key or tenant",
    MissCause.ADAPTER: "it is cached for another adapter, or for the model without one",
    MissCause.PAGE: "what it shares with an earlier prompt is less than a page",
    MissCause.PART: "the replica has its K and V, and no longer the window or state behind which it could go on",
    MissCause.RESTARTED: "the replica that held it has left, or was flushed{by}",
    MissCause.NEVER: "it was never seen, or is forgotten{by}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How pages left a replica's own tiers."""

    cause: MissCause  # EVICTED or RESTARTED
    replica_id: str
    time_s: float  # on the router's clock, when it heard of it
    tier: Tier | None = None  # from which; None: it is not known, as the next two
    tenant: str = ""  # whose request needed the room
    idle_s: float | None = None  # since their last use


class PromptParts(NamedTuple):
    """The hashes of a prompt's parts, each text's own and that of the text without its time stamps."""

    tools: tuple[tuple[int, int], ...] = ()
    messages: tuple[tuple[int, int], ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def frame(self) -> tuple[tuple[int, int], ...]:
        """Tools, and the system text that begins the messages."""
        return self.tools + self.messages[: bool(self.roles) and self.roles[0] in SYSTEM]

    def name(self, index: int) -> str:
        """Say which message ``index`` is."""
        role = self.roles[index]
        return "the system text" if role in SYSTEM else f"message {index + 1} ({role})"


class Asked(NamedTuple):
    """A prompt, under the names that separate what is cached."""

    token_ids: TokenIds
    owner: str = ""  # of its key
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    session_id: str = ""
    parts: PromptParts | None = None  # None: it is one text

    @property
    def space(self) -> tuple[str, str, str]:
        return self.owner, self.salt, self.adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why an answer reused fewer prompt tokens than it could have."""

    cause: MissCause
    at: int  # the first token that was not cached
    tokens: int  # that were computed for this cause, at most
    cost_s: float  # of computing them, at the rate of the replica as the decision had it
    tenant: str = ""  # of the request
    what: str = ""  # the part that changed; the replica that holds it
    by: Departure | None = None

    @property
    def told(self) -> str:
        """The cause as a client may know it."""
        others = self.cause in (MissCause.TENANT, MissCause.SALT, MissCause.ADAPTER)
        return str((MissCause.NEVER if others else self.cause).value)

    def words(self, decision: Decision) -> str:
        """Say it in a sentence for operators."""
        by, costs = self.by, ""
        parts = list[str]()
        if by is not None:
            before_s = decision.time_s - by.time_s
            when = f" {before_s:.1f} s before," if before_s > 0 else ""  # else the router heard of it later
            parts.append(f"{when} on {by.replica_id}")
        if by is not None and by.tier is not None:
            parts.append(f"from the {by.tier.value}")
        if by is not None and by.idle_s is not None:
            parts.append(f"unused for {by.idle_s:.1f} s")
        if by is not None and by.tenant:
            parts.append(f"for a request of {by.tenant}")
        if self.cause is MissCause.ELSEWHERE:
            ttft_s = {each.replica_id: each.terms.ttft_s for each in decision.candidates}
            if self.what in ttft_s:
                here = ttft_s[decision.prefill_id or decision.replica_id]
                costs = f": its first token would have come after {ttft_s[self.what]:.3f} s there, {here:.3f} s here"
        said = SAID[self.cause].format(at=self.at, what=self.what, by=", ".join(parts), costs=costs)
        return f"{self.tokens} tokens were computed ({self.cost_s:.3f} s): {said}"


class _Turn(NamedTuple):
    """The last prompt of a conversation."""

    parts: PromptParts
    keys: PageKeys
    num_tokens: int
    time_s: float  # of its first token


K = TypeVar("K")
V = TypeVar("V")


class Book(Generic[K, V]):
    """A map of at most ``most`` entries, the one written longest ago out first."""

    def __init__(self, most: int) -> None:
        self.entries: OrderedDict[K, V] = OrderedDict()
        self._most = most

    def put(self, key: K, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self._most:
            self.entries.popitem(last=False)


class Departures(Book[int, Departure]):
    """How each page last left a replica, by the page's number in the index."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        super().__init__(most)

    def add(self, pages: Sequence[int], how: Departure) -> None:
        """Note that ``pages`` left a replica."""
        for page in pages:
            self.put(page, how)


class PromptHistory:
    """The prompts that came to this router, and the judge of each new one."""

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], float],
        *,
        departure: Callable[[int], Departure | None] = lambda key: None,
        holder: Callable[[int, Decision], str] = lambda key, decision: "",
    ) -> None:
        """``departure``: how the page of a key left a replica. ``holder``: a replica that holds the page and was not
        compared in a decision; "" for none."""
        self._page_size = page_size
        self._clock = clock
        self._departure, self._holder = departure, holder
        self._turns: Book[int, _Turn] = Book(MOST_TURNS)  # by the hash of a name
        self._num_turn_pages = self._num_messages = 0
        self._spaces: Book[int, tuple[str, str, str]] = Book(MOST_PREFIXES)  # by prefix: the names of its last prompt
        self._timeless: Book[int, tuple[int, int]] = Book(MOST_PARTS)  # by the hash of a text: both its hashes
        self.misses = Misses(clock)

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> PromptParts:
        """Hash the parts of a conversation that was encoded; a microsecond a part, and more for one that is new."""
        hashed, roles, known = [], [], self._timeless.entries
        for message in messages:
            role, content = str(message.get("role", "")), message.get("content")
            text = content if type(content) is str and len(message) == 2 else repr(message)
            roles.append(role)
            hashed.append(known.get(hash((role, text))) or self._hashed(role, text))
        told = [repr(tool) for tool in tools]
        return PromptParts(tuple([self._hashed("tool", each) for each in told]), tuple(hashed), tuple(roles))

    def judge(self, decision: Decision, cached_tokens: int, asked: Asked) -> Miss | None:
        """Name the cause why no more than ``cached_tokens`` of a prompt were cached, if there is one, and remember it.

        Called with its first token."""
        if asked.parts is None:
            ids = np.ascontiguousarray(asked.token_ids, dtype=np.int32)
            whole = hash(ids.tobytes())
            asked = asked._replace(parts=PromptParts(messages=((whole, whole),), roles=("prompt",)))
        assert asked.parts is not None
        names = self._names(asked)
        found = self._found(asked, names)
        prefixes = self._prefixes(asked, behind=cached_tokens // self._page_size)
        miss = self._miss(decision, cached_tokens, asked, *found, prefixes)
        turn = _Turn(
            parts=asked.parts, keys=decision.keys, num_tokens=decision.num_tokens, time_s=self._clock()
        )
        for name in names:
            self._remember(name, turn)
        space, spaces = asked.space, self._spaces.entries
        for _, prefix in prefixes:
            if spaces.get(prefix) != space:
                self._spaces.put(prefix, space)
        return miss

    def settled(self, miss: Miss, decision: Decision) -> Miss:
        """Look again at the end of the request: events of pages come behind tokens."""
        page = miss.at // self._page_size
        if miss.by is None and miss.cause in (MissCause.EVICTED, MissCause.NEVER) and page < len(decision.keys):
            by = self._departure(_key_at(decision, page))
            if by is not None and by.time_s - decision.time_s < decision.predicted_ttft_s + miss.cost_s:
                miss = replace(miss, cause=by.cause, by=by)
        self.misses.add(miss)
        return miss

    def _miss(
        self, decision: Decision, cached: int, asked: Asked, turn: _Turn | None, is_frame: bool,
        prefixes: Sequence[tuple[int, int]],
    ) -> Miss | None:  # fmt: skip
        size, keys = self._page_size, decision.keys
        usable, at = (decision.num_tokens - 1) // size, cached // size
        parts = asked.parts
        assert parts is not None

        def same() -> bool:
            return turn is not None and not is_frame and _differs(turn.parts, parts) is None

        def of(cause: MissCause, tokens: int, what: str = "", by: Departure | None = None) -> Miss:
            rate = decision.prefill_tokens_per_s
            cost_s = tokens / rate if rate else 0.0
            return Miss(cause=cause, at=cached, tokens=tokens, cost_s=cost_s, tenant=asked.tenant, what=what, by=by)

        if not usable:
            return of(MissCause.PAGE if same() else MissCause.NEVER, decision.num_tokens)
        if at >= usable:
            return None
        best_id, best = decision.best_overlap
        if decision.gone_tokens and cached <= decision.overlap_tokens:
            return of(MissCause.PART, decision.gone_tokens)
        if best > max(cached, decision.overlap_tokens) and best_id != (decision.prefill_id or decision.replica_id):
            return of(MissCause.ELSEWHERE, best - cached, best_id)
        by = self._departure(_key_at(decision, at))
        if by is not None:
            end, most = at + 1, min(at + MOST_LOOKED_AT, usable)
            while end < most and self._departure(_key_at(decision, end)) is not None:
                end += 1
            if end == most < usable and self._departure(_key_at(decision, usable - 1)) is not None:
                end = usable  # those between are taken to have gone too
            return of(by.cause, (end - at) * size, by=by)
        if holder := self._holder(_key_at(decision, at), decision):
            return of(MissCause.ELSEWHERE, size, holder)
        if turn is not None:
            num = min(len(turn.keys), usable)
            differ = np.flatnonzero(turn.keys[:num] != keys[:num])
            shared = int(differ[0]) if len(differ) else num
            if at == shared and shared < num and (changed := _changed(turn.parts, parts, frame_only=is_frame)):
                return of(changed[0], (num - shared) * size, changed[1])
            if not is_frame:
                if at < shared:
                    was_there = turn.time_s < decision.time_s
                    return of(MissCause.EVICTED if was_there else MissCause.NEVER, (shared - at) * size)
                return of(MissCause.PAGE, turn.num_tokens) if not len(turn.keys) and same() else None
        space = asked.space
        for depth, prefix in reversed(prefixes):
            other = self._spaces.entries.get(prefix)
            if other is not None and other != space and 4 * depth >= usable:
                kinds = MissCause.TENANT, MissCause.SALT, MissCause.ADAPTER  # as in `Asked.space`
                others = {kind for kind, mine, theirs in zip(kinds, space, other, strict=True) if mine != theirs}
                cause = next(each for each in (kinds[0], kinds[2], kinds[1]) if each in others)
                return of(cause, (depth - at) * size)
        return of(MissCause.NEVER, decision.num_tokens - cached)

    def _hashed(self, role: str, text: str) -> tuple[int, int]:
        exact = hash((role, text))
        pair = self._timeless.entries.get(exact)
        if pair is None:
            most = LONG_TEXT if role in SYSTEM else HEAD
            head = text[:most]
            pair = exact, hash((role, _TIME.sub("", head), text[most:])) if _DIGITS.search(head) else exact
            self._timeless.put(exact, pair)
        return pair

    def _names(self, asked: Asked) -> list[int]:
        """Return the names under which a later turn finds this one: session, last message, frame."""
        parts, space = asked.parts, asked.space
        assert parts is not None
        names = [hash(("session", space, asked.session_id))] if asked.session_id else []
        if parts.messages and not names:
            names = [hash(("last", space, parts.messages[-1][0]))]
        frame = parts.frame
        return [*names, hash(("frame", space, *sorted([each[1] for each in frame])))] if frame else names

    def _found(self, asked: Asked, names: Sequence[int]) -> tuple[_Turn | None, bool]:
        """Find the turn before, and say whether it is only known to have the same frame."""
        turns, parts, space = self._turns.entries, asked.parts, asked.space
        assert parts is not None
        if asked.session_id and (turn := turns.get(names[0])) is not None:
            return turn, False
        num = len(parts.messages)
        for last in range(num - 1, max(num - MOST_BACK, 0) - 1, -1):
            turn = turns.get(hash(("last", space, parts.messages[last][0])))
            if turn is not None and len(turn.parts.messages) == last + 1:
                same = sum(map(tuple.__eq__, turn.parts.messages, parts.messages))
                if 2 * same > last:
                    return turn, False
        turn = turns.get(names[-1]) if parts.frame else None
        return turn, True

    def _remember(self, name: int, turn: _Turn) -> None:
        if (before := self._turns.entries.pop(name, None)) is not None:
            self._count(before, -1)
        self._turns.entries[name] = turn
        self._count(turn, 1)
        entries = self._turns.entries
        while len(entries) > MOST_TURNS or (
            len(entries) > 1 and (self._num_turn_pages > MOST_TURN_PAGES or self._num_messages > MOST_MESSAGES)
        ):
            self._count(entries.popitem(last=False)[1], -1)

    def _count(self, turn: _Turn, sign: int) -> None:
        self._num_turn_pages += sign * len(turn.keys)
        self._num_messages += sign * len(turn.parts.messages)

    def _prefixes(self, asked: Asked, *, behind: int) -> list[tuple[int, int]]:
        """Hash the prefixes of 1, 4, 16, ... pages, whatever they are cached under, of more than ``behind``, which are
        known: pages, hash."""
        num, page_bytes, digest = len(asked.token_ids), 4 * self._page_size, xxhash.xxh3_64_intdigest
        depths = [pages for pages in _DEPTHS if behind < pages and pages * self._page_size < num]
        if not depths:
            return []
        data = np.ascontiguousarray(asked.token_ids, dtype=np.int32).data.cast("B")
        return [(pages, digest(data[: pages * page_bytes])) for pages in depths]


def _key_at(decision: Decision, page: int) -> int:
    return int(decision.keys[page])


def _differs(old: PromptParts, new: PromptParts) -> int | None:
    """Return the first message in which ``new`` does not go on as ``old``; None where it does."""
    if old.tools != new.tools:
        return 0
    pairs = itertools.zip_longest(old.messages, new.messages[: len(old.messages)])
    return next((at for at, (was, now) in enumerate(pairs) if was != now), None)


def _changed(old: PromptParts, new: PromptParts, *, frame_only: bool) -> tuple[MissCause, str] | None:
    """Return how ``new`` differs from ``old``, and where; None where it does not, in tools and system text."""
    if frame_only:
        old = old._replace(messages=old.frame[len(old.tools) :])
        new = new._replace(messages=new.frame[len(new.tools) :])
    num = len(old.messages)
    at = _differs(old._replace(tools=()), new._replace(tools=()))
    began = new.messages[:num]
    if old.tools != new.tools and not (at == 0 and new.roles[0] in SYSTEM):  # its text stands before them
        if sorted(old.tools) == sorted(new.tools):
            return MissCause.REORDERED, "the list of tools"
        pairs = enumerate(zip(old.tools, new.tools, strict=False))
        tool = next((n for n, (was, now) in pairs if was != now), min(len(old.tools), len(new.tools)))
        stamped = [each[1] for each in old.tools] == [each[1] for each in new.tools]
        return MissCause.TIME_STAMP if stamped else MissCause.CHANGED, f"tool {tool + 1}"
    if at is None:
        return None if frame_only else (MissCause.CHANGED, "what the chat template adds to the messages")
    what = new.name(at) if at < len(new.roles) else f"message {at + 1}"
    if len(began) == num and sorted(old.messages) == sorted(began):
        return MissCause.REORDERED, what
    stamped = [each[1] for each in old.messages] == [each[1] for each in began]
    return MissCause.TIME_STAMP if stamped else MissCause.CHANGED, what


@dataclass(slots=True)
class _Row:
    requests: int = 0
    tokens: int = 0
    cost_s: float = 0.0


@dataclass(slots=True)
class Misses:
    """The causes of the last day, by tenant and five minutes."""

    clock: Callable[[], float]
    rows: deque[tuple[float, dict[tuple[str, str], _Row]]] = field(default_factory=deque)

    def add(self, miss: Miss) -> None:
        """Count a request."""
        began_s = self.clock() // ROW_S * ROW_S
        if not self.rows or self.rows[-1][0] != began_s:
            self.rows.append((began_s, {}))
            while len(self.rows) > 1 and (began_s - self.rows[0][0] > 86_400 or self.num_rows > MOST_ROWS):
                self.rows.popleft()
        row = self.rows[-1][1].setdefault((miss.tenant, miss.cause.value), _Row())
        row.requests, row.tokens, row.cost_s = row.requests + 1, row.tokens + miss.tokens, row.cost_s + miss.cost_s

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.rows)

    def table(self, last_s: float) -> list[dict[str, Any]]:
        """Sum up the last ``last_s`` seconds, to five minutes, the most costly first."""
        since_s, total = self.clock() - last_s - ROW_S, dict[tuple[str, str], _Row]()
        for began_s, rows in self.rows:
            for key, row in rows.items() if began_s > since_s else ():
                into = total.setdefault(key, _Row())
                into.requests, into.tokens = into.requests + row.requests, into.tokens + row.tokens
                into.cost_s += row.cost_s
        return summed(
            [{"tenant": tenant, "cause": cause, "requests": row.requests, "tokens": row.tokens, "seconds": row.cost_s}]
            for (tenant, cause), row in total.items()
        )


def summed(tables: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Add up the rows of several tables, by tenant and cause, the most tokens first."""
    total: dict[tuple[str, str], dict[str, Any]] = {}
    for row in itertools.chain.from_iterable(tables):
        key = row["tenant"], row["cause"]
        into = total.setdefault(key, {"tenant": key[0], "cause": key[1], "requests": 0, "tokens": 0, "seconds": 0.0})
        for name in ("requests", "tokens", "seconds"):
            into[name] += row[name]
    return sorted(total.values(), key=lambda row: -float(row["tokens"]))
