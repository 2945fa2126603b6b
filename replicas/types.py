"""The values that cross the engine's border: requests in, token deltas out, statistics. Standard library and
numpy only.

Frozen values; picklable; the same types travel from the router to the replica and back.
"""

import dataclasses
import enum
import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtransfer.types import PdTicket, TransferStats
from replicas.errors import Fault, InvalidRequest

MAX_PROMPT_LOGPROBS = 300_000  # of one HTTP request, alternatives and choices counted: about 10 MB of its answer
MAX_STOP_CHARACTERS = 16 << 10  # of a request, in all: the automaton that finds them takes 350 bytes for each
MAX_DEADLINE_S = 7 * 24 * 3600.0  # of a request
LOWEST = -9999.0  # in the place of an infinite number
TokenIds = npt.NDArray[np.int32]  # [n] token ids


class FinishReason(enum.Enum):
    """How a request ended; every accepted request ends in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OFF = "handed_off"  # of a prefill leg: another replica has its K/V and goes on with it


# step_failed: the engine went on without it; died_in_step: that step ended the engine
RetryAs = Literal["overloaded", "engine_dead", "taken_back", "step_failed", "died_in_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a request ended, and what matched."""

    reason: FinishReason
    matched: int | str | None = None  # stop token id or stop string, for STOP
    message: str | None = None  # for ABORT and ERROR: one sentence that says what happened
    fault: Fault | None = None  # the kind of failure, for ABORT and ERROR
    # an end that another replica may mend; taken back: the router asked for it before it was admitted
    retry_as: RetryAs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an output must be: every token is held to it (replicas/grammar)."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str  # the schema as JSON, the regular expression, or the grammar in llguidance's dialect of Lark
    after: str = ""  # it begins behind the first of this text in the output, as "</think>"; before, any token may come
    # with ``after``: the text that what stands before begins with, as "<think>"; an output that begins with another is
    # held to the constraint at once. Empty: it has begun in the prompt
    opens: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What is read where the prompt ends, beside the one token that is made there, which is discarded. The reading
    is carried by that token's logprob."""

    labels: tuple[int, ...] = ()  # tokens whose logprobs stand in place of the most likely, in this order
    method: Literal["last", "mean"] | None = None  # of the hidden states behind the last norm; None: not given

    def validate(self, *, vocab_size: int) -> None:
        """Raise InvalidRequest for labels that are no tokens, or too many."""
        _check("label_token_ids", len(self.labels) <= 1024, f"at most 1,024, got {len(self.labels)}")
        for token in self.labels:
            _check("label_token_ids", 0 <= token < vocab_size, f"{token} is not in the vocabulary of {vocab_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientField:
    """How clients ask for a field of a request, and what they may say: the only entry of the field. Bodies, headers and
    their documents (deployments/http/bodies.py), and what is checked here, are made from it."""

    meaning: str
    name: str = ""  # in the body; by default the field's own
    header: str = ""  # that it is read from, in place of the body
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    authors: bool = False  # the model's author may say it too (generation_config.json)

    def check(self, value: float) -> None:
        """Raise InvalidRequest if ``value`` is out of bounds."""
        if not (math.isfinite(value) and self.least <= value <= self.most and value > self.above):
            bounds = f"above {self.above:,g}" if math.isfinite(self.above) else f"at least {self.least:,g}"
            name = self.header or self.name
            raise InvalidRequest(f"{name}: must be {bounds} and at most {self.most:,.7g}, got {value}", param=name)


def asked(default: Any, meaning: str, **how: Any) -> Any:
    """Declare a field that clients can ask for. ``how``: of `ClientField`."""
    return field(default=default, metadata={"client": ClientField(meaning=meaning, **how)})


@cache
def client_fields(of: Any) -> Mapping[str, ClientField]:
    """Return the fields of a dataclass that clients can ask for, by their names in it."""
    found = {each.name: each.metadata["client"] for each in dataclasses.fields(of) if "client" in each.metadata}
    return {name: dataclasses.replace(each, name=each.name or name) for name, each in found.items()}


def check_asked(values: Any) -> None:
    """Raise InvalidRequest, which names the field, if what a client asked for is out of bounds."""
    of: Any = type(values)
    for name, each in client_fields(of).items():
        if (value := getattr(values, name)) is not None:
            each.check(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Field meanings follow SGLang and OpenAI.

    The random number of a token is a function of (seed, position) alone, never of the batch.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0  # until then eos and stop ids are masked out
    min_holds_stops: bool = False  # nor does a stop string end it before (vLLM's min_tokens)
    temperature: float = asked(1.0, "0: the most likely token.", least=0, most=100, authors=True)
    top_p: float = asked(
        1.0, "Choose among the most likely tokens that together have this probability.", above=0, most=1, authors=True
    )
    top_k: int | None = None  # keep the k most likely; None keeps all
    min_p: float = asked(
        0.0, "Choose among tokens that have this share of the most likely one's probability.", least=0, most=1,
        authors=True,
    )  # fmt: skip
    n: int = asked(1, "Answers for each prompt.", least=1, most=128)
    ignore_eos: bool = asked(False, "The model's own end tokens do not end the answer.")
    skip_special_tokens: bool = asked(True, "false: special tokens appear in the text.")
    repetition_penalty: float = asked(
        1.0, "Divides the logits of tokens in prompt and output; 1: none.", least=0.01, most=10, authors=True
    )
    presence_penalty: float = asked(0.0, "Subtracted from the logits of tokens in the output.", least=-2, most=2)
    frequency_penalty: float = asked(
        0.0, "Subtracted from a token's logit once for each time it is in the output.", least=-2, most=2
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is ever made
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of each is masked out after the others of it
    seed: int = 0  # 64 bits
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the text (SGLang's no_stop_trim)
    constraint: Constraint | None = None
    pooling: PoolingParams | None = None  # of a request for one token, with return_logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether every step edits the logits; until min_new_tokens steps may in addition, by the ids that end it."""
        return self.has_penalties or bool(self.logit_bias) or self.allowed_token_ids is not None or bool(self.bad_words)

    def for_choice(self, index: int) -> "SamplingParams":
        """Return the parameters of choice ``index`` when n > 1: equal but for the seed, which choice 0 keeps."""
        if index == 0:
            return dataclasses.replace(self, n=1)
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return dataclasses.replace(self, n=1, seed=int.from_bytes(digest, "little") >> 1)

    def validate(self, *, vocab_size: int) -> None:
        """Raise InvalidRequest, which names the field, for a value out of its range."""
        _check("max_tokens", self.max_new_tokens >= 0, f"must be >= 0, got {self.max_new_tokens}")
        _check(
            "min_tokens",
            0 <= self.min_new_tokens <= max(self.max_new_tokens, 0),
            f"must be between 0 and max_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
        )
        check_asked(self)
        _check("top_k", self.top_k is None or self.top_k >= 1, f"must be >= 1 (or -1 for all), got {self.top_k}")
        _check("seed", 0 <= self.seed < 2**64, f"must be between 0 and 2**64 - 1, got {self.seed}")
        _check("logit_bias", len(self.logit_bias) <= 1024, f"at most 1,024 tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias:
            _check("logit_bias", 0 <= token < vocab_size, f"token {token} is not in the vocabulary of {vocab_size}")
            _check("logit_bias", math.isfinite(bias) and -100 <= bias <= 100, f"{bias} is not between -100 and 100")
        self._validate_masks(vocab_size)
        if self.pooling is not None:
            self.pooling.validate(vocab_size=vocab_size)
        _check("stop_token_ids", len(self.stop_token_ids) <= 256, f"at most 256, got {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            _check("stop_token_ids", 0 <= token < vocab_size, f"token {token} is not in the vocabulary of {vocab_size}")
        _check("stop", len(self.stop) <= 64, f"at most 64 stop strings, got {len(self.stop)}")
        _check("stop", all(0 < len(s) <= 1024 for s in self.stop), "each stop string must have 1 to 1,024 characters")
        num_characters = sum(map(len, self.stop))
        at_most = f"at most {MAX_STOP_CHARACTERS:,} characters in all, got {num_characters:,}"
        _check("stop", num_characters <= MAX_STOP_CHARACTERS, at_most)

    def _validate_masks(self, vocab_size: int) -> None:
        allowed, bad = self.allowed_token_ids, self.bad_words
        _check("allowed_token_ids", allowed != (), "is empty; give at least one token, or leave it out")
        _check("bad_words", len(bad) <= 512 and all(bad), f"at most 512 sequences, none empty; got {len(bad)}")
        for name, ids in (("allowed_token_ids", allowed or ()), *(("bad_words", word) for word in bad)):
            for token in (min(ids), max(ids)) if ids else ():
                _check(name, 0 <= token < vocab_size, f"token {token} is not in the vocabulary of {vocab_size}")
        last = {word[-1] for word in bad}
        left = len(last) < vocab_size if allowed is None else not last.issuperset(allowed)
        _check("bad_words", left, "each token that is allowed ends one of them: allow one more")


def to_token_ids(raw: Sequence[Any] | npt.NDArray[Any], *, param: str) -> TokenIds:
    """Convert a sequence of ints (a list, a tuple, an array or a tensor of a CPU) to an array [n]; n may be 0.

    Raises: InvalidRequest, which names ``param``, for what is no such sequence, or holds ids that no model can have.
    """
    try:
        ids = np.asarray(raw)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal length; a tensor of a GPU
        ids = np.empty((), np.object_)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    ints = ids.ndim == 1 and (ids.dtype.kind in "iu" or all(isinstance(token, int) for token in ids.tolist()))
    _check(param, ints and ids.dtype.kind != "b", f"must be a sequence of ints, got {type(raw).__name__}: {raw!r:.60}")
    _check(param, ids.min() >= 0 and ids.max() < 2**31, "token ids must be in [0, 2**31)")
    return ids.astype(np.int32)


def check_prompt_logprobs(num_logprobs: int) -> None:
    """Raise InvalidRequest if ``num_logprobs`` is more than one answer may hold."""
    _check(
        "logprobs",
        num_logprobs <= MAX_PROMPT_LOGPROBS,
        f"{num_logprobs:,} logprobs of the prompt were asked for, at most {MAX_PROMPT_LOGPROBS:,} are given: ask for "
        "fewer alternatives, prompts or choices, or start later",
    )


def _check(param: str, ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param}: {message}", param=param)


class PdLeg(enum.Enum):
    """The side of a KV transfer that a request is: prefill or decode; or it fetches pages from another replica."""

    PREFILL = "prefill"
    DECODE = "decode"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTransfer:
    """The transfer of a request that two replicas compute: one the K/V of its prompt, the other its tokens. Or a fetch:
    one replica computes it, and another one has cached pages of its prompt."""

    leg: PdLeg
    ticket: PdTicket
    fetch: PdTicket | None = None  # prefill leg: of pages that it fetches first


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTransferReport:
    """How a KV transfer or fetch went, as the receiver saw it. It comes with the first token, or, if it failed, and of
    a fetch, on a delta of its own as soon as that is known."""

    transferred: bool  # False: it failed, and the prompt was computed where it decodes
    reason: str | None = None  # why it failed
    num_pages: int = 0
    num_bytes: int = 0  # that came
    grant_s: float = 0.0  # from arrival until row and pages were granted
    wait_s: float = 0.0  # from then until all had come, or failed
    transfer_s: float = 0.0  # of it, from the first page to the last


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The stages of one choice of a request, in seconds, on the engine that ran it; consecutive, so that they sum to
    the time from arrival to the end (request.py draws them). On the last delta of the choice; the prefill leg of a
    KV transfer has its own. A retracted request stays in its stage while it waits again."""

    # until the first step that computed something of it, or, of a decode leg, row and pages; of one whose K/V did not
    # come, the second wait too
    queue_s: float = 0.0
    prefill_s: float = 0.0  # from then to the first token; of a decode leg that received its K/V, 0
    transfer_s: float = 0.0  # from row and pages until the K/V had come, or failed; of a prefill leg, after its steps
    decode_s: float = 0.0  # after the first token
    passed_s: float = 0.0  # of queue_s and decode_s: others went before it, as their tenants had used less


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """An adapter (LoRA) by what it holds; a name is an alias, and its requests keep what it meant when they came."""

    identity: str  # digest of the files (checkpoints/adapters.py `identify`)
    path: str  # its folder, as replicas see it
    name: str = field(default="", compare=False)  # that its request has used

    @property
    def space(self) -> str:
        """What its requests' salts begin with: their pages are no other adapter's, and not the model's own."""
        return f"\1{self.identity}\1"  # clients cannot send it


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """The beginning of a prompt that its client asks to keep for a while, within its share of the cache."""

    length: int  # tokens
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One tokenised request. Made once, in the router; the engine never sees text of the prompt."""

    rid: str
    token_ids: TokenIds  # [L] the prompt, L >= 1; made from any sequence of ints (`to_token_ids`)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""  # requests with different ones never share a page
    priority: int = asked(
        0, "A higher number is served first, where `scheduler.priorities` is on.", least=-1000, most=1000
    )
    tenant: str = ""  # whose share of the replica it takes
    weight: float = 1.0  # of that share
    deadline_s: float | None = asked(
        None, "Seconds until the request is aborted with 504; in a stream, with an error event.", name="timeout",
        above=0, most=MAX_DEADLINE_S,
    )  # fmt: skip
    objective_s: float | None = asked(  # None: it is never late
        None, "Seconds within which its first token should come.", header="x-manta-objective",
        above=0, most=MAX_DEADLINE_S,
    )  # fmt: skip
    waited_s: float = 0.0  # before submit, at replicas that are gone: it goes before those that came after it
    return_logprobs: bool = False  # logprob of each output token
    top_logprobs: int = 0  # and of this many most likely alternatives, 0 to 20
    prompt_logprobs_from: int | None = None  # also prompt logprobs for positions >= this; None: none
    resumed_ids: tuple[int, ...] = ()  # output already delivered by a replica that died; continue after it
    kv_transfer: PdTransfer | None = None  # None: this replica does all of it
    recall: str = ""  # by which another router asks for its output, should this one die; "" for no such request
    routing_key: str = ""  # scheduler.policy: routing-key starts requests of the keys that run most; "" for none
    offline: bool = False  # a batch request: it runs in the gaps that others leave, below every priority
    adapter: AdapterRef | None = None  # None: the model as it is
    cache_breakpoints: tuple[CacheBreakpoint, ...] = ()

    def __post_init__(self) -> None:
        """Raises: InvalidRequest, as `to_token_ids`."""
        ids = self.token_ids
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1):
            object.__setattr__(self, "token_ids", to_token_ids(ids, param="token_ids"))

    @property
    def namespace(self) -> str:
        """What its pages are named under, wherever they are: requests of different namespaces never share one."""
        return self.cache_salt if self.adapter is None else self.adapter.space + self.cache_salt

    @property
    def num_choices(self) -> int:
        """The number of sequences that end here, each with a finish: 1 for a prefill leg, else n."""
        return 1 if self.kv_transfer is not None and self.kv_transfer.leg is PdLeg.PREFILL else self.sampling.n

    @property
    def num_prompt_logprobs(self) -> int:
        """The number of logprobs of prompt tokens in the answer, over alternatives and choices."""
        if self.prompt_logprobs_from is None:
            return 0
        return (len(self.token_ids) - self.prompt_logprobs_from) * (1 + self.top_logprobs) * self.sampling.n

    def validate(self, *, vocab_size: int) -> None:
        """Raise InvalidRequest for a wrong field. The engine checks lengths: it knows the context and the pool."""
        _check("prompt", len(self.token_ids) > 0, "is empty; give at least one token")
        _check("top_logprobs", 0 <= self.top_logprobs <= 20, f"must be between 0 and 20, got {self.top_logprobs}")
        check_asked(self)
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        _check("prompt", low >= 0 and high < vocab_size, f"token ids must be in [0, {vocab_size}), got {low}..{high}")
        start = self.prompt_logprobs_from
        _check("logprob_start_len", start is None or 0 <= start <= len(self.token_ids), "lies outside the prompt")
        check_prompt_logprobs(self.num_prompt_logprobs)
        self.sampling.validate(vocab_size=vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of one token under the model (before temperature and cuts, after nothing)."""

    token_id: int
    logprob: float | None  # None for the first prompt token, which has no context
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # of a prompt token: 1 + the number of tokens that are more likely
    hidden: tuple[float, ...] = ()  # pooled hidden states, where `PoolingParams` asks for them


def finite(number: float | None) -> float | None:
    """Replace an infinite number, such as the logprob of a token that is masked out: JSON cannot express it."""
    if number is None:
        return None
    return number if math.isfinite(number) else LOWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose K/V was reused, all tiers
    num_retractions: int = 0
    host_tokens: int = 0  # of cached_tokens, those that were loaded from host memory
    store_tokens: int = 0  # of cached_tokens, those that were read from the store
    kept_tokens: int = 0  # prompt tokens that the cache has got of this choice, or had before
    drafted_tokens: int = 0  # guesses that decode steps tried
    accepted_tokens: int = 0  # of drafted_tokens, those that came true: tokens without a step of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """The addition of one step (or several, merged) to one choice of one request."""

    rid: str
    index: int = 0  # choice, 0 <= index < n
    token_ids: tuple[int, ...] = ()  # every output token exactly once, the stop token included
    text: str = ""  # concatenation over deltas is the whole text; stop strings trimmed
    logprobs: tuple[TokenLogprob, ...] = ()  # [len(token_ids)] when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first delta, when asked for
    usage: Usage
    finish: Finish | None = None  # on the last delta of the choice
    kv_transfer: PdTransferReport | None = None  # once, where one was tried
    stages: StageTimes | None = None  # on the first and last delta of a choice, unless the engine itself has died

    @property
    def is_part(self) -> bool:
        """Whether it holds only some of the prompt's logprobs; the rest comes with the first token."""
        return bool(self.prompt_logprobs) and not self.token_ids and self.finish is None

    @property
    def is_report(self) -> bool:
        """Whether it holds only the report of a KV transfer, which is not for the client."""
        return self.kv_transfer is not None and self.finish is None and not (self.token_ids or self.prompt_logprobs)

    def merge(self, *later: "TokenDelta") -> "TokenDelta":
        """Return this delta and those after it as one, in linear time: what a slow consumer receives."""
        deltas, last = (self, *later), later[-1] if later else self
        assert all((each.rid, each.index) == (self.rid, self.index) for each in later)
        assert all(each.finish is None for each in deltas[:-1]), "nothing comes after a finish"
        return TokenDelta(
            rid=self.rid,
            index=self.index,
            token_ids=tuple(chain.from_iterable(each.token_ids for each in deltas)),
            text="".join([each.text for each in deltas]),
            logprobs=tuple(chain.from_iterable(each.logprobs for each in deltas)),
            prompt_logprobs=tuple(chain.from_iterable(each.prompt_logprobs for each in deltas)),
            usage=last.usage,
            finish=last.finish,
            kv_transfer=next((each.kv_transfer for each in deltas if each.kv_transfer is not None), None),
            stages=next((each.stages for each in reversed(deltas) if each.stages is not None), None),
        )


class Pending:
    """Deltas that wait for a slow consumer: at most one for each choice, merged. Not thread-safe."""

    def __init__(self) -> None:
        self._by_choice: dict[tuple[str, int], TokenDelta] = {}

    def __len__(self) -> int:
        return len(self._by_choice)

    def add(self, delta: TokenDelta) -> None:
        key = (delta.rid, delta.index)
        before = self._by_choice.get(key)
        self._by_choice[key] = delta if before is None else before.merge(delta)

    def take(self) -> list[TokenDelta]:
        """Return all that waits, in the order in which the choices began to wait; nothing waits afterwards."""
        taken, self._by_choice = self._by_choice, {}
        return list(taken.values())

    def check(self) -> None:
        """Raise AssertionError if a delta is kept for another choice than its own."""
        assert all(key == (delta.rid, delta.index) for key, delta in self._by_choice.items())


@dataclass(frozen=True, slots=True)
class ToldAs:
    """Where a statistic comes from, and the names by which it is told (docs/extending.md)."""

    metric: str = ""  # of dashboards/catalog.py, which has its unit and its sentence
    of: str = ""  # what of `Sources` it is, or is the length of (engine/stepping.py); "": it is computed there
    row: str = ""  # in a replica's row of the live view
    log: str = ""  # in the line of activity: a gauge as it is, of a counter what was added
    labels: Mapping[str, str] = field(default_factory=dict)  # of the metric

    @property
    def is_counter(self) -> bool:
        return self.metric.endswith("_total")


def stat(metric: str = "", of: str = "", *, row: str = "", log: str = "", default: Any = MISSING, **labels: str) -> Any:
    """Make the field of a statistic."""
    return field(default=default, metadata={"told": ToldAs(metric, of, row, log, labels)})


def each_told(stats: type) -> list[tuple[str, ToldAs]]:
    """List the statistics of a class with what `stat` said of each."""
    return [(each.name, each.metadata["told"]) for each in dataclasses.fields(stats) if "told" in each.metadata]


class PressureLevel(enum.Enum):
    """Share of the pool that cannot be given to a new request (SPEC D15): > 0.95, > 0.85, > 0.70, or less."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """The device pool by state, in pages and tokens; the five states sum to the capacity (SPEC D14)."""

    page_size: int
    num_pages: int
    free_pages: int
    evictable_pages: int
    protected_pages: int  # in the tree and locked by a request
    reserved_pages: int  # held by requests outside the tree
    quarantined_pages: int = 0  # of failed KV transfers: a peer may still write to them

    @property
    def total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens of pages that a new request cannot have: protected, reserved and quarantined."""
        return (self.protected_pages + self.reserved_pages + self.quarantined_pages) * self.page_size

    @property
    def utilization(self) -> float:
        return self.used_tokens / self.total_tokens if self.num_pages else 0.0

    @property
    def pressure(self) -> PressureLevel:
        for bound, level in ((0.95, PressureLevel.CRITICAL), (0.85, PressureLevel.HIGH), (0.70, PressureLevel.MEDIUM)):
            if self.utilization > bound:
                return level
        return PressureLevel.LOW


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The tiers under one engine's device pool; counters only grow. Tokens are whole pages."""

    host_pages: int  # capacity of the host tier
    host_used_pages: int
    clean_pages: int = 0  # of the device pool, with a copy on the host
    store: str | None = None  # which store; replicas with the same one share its pages
    store_error: str | None = None  # why it is not used at present
    store_bytes: int = stat("tier_used_bytes", tier="L3", default=0)
    store_items: int = 0
    # counters
    # of prompts, loaded instead of computed
    host_hit_tokens: int = stat("cache_hit_tokens_total", tier="L2", default=0)
    # of prompts, read from the store and loaded instead of computed
    store_hit_tokens: int = stat("cache_hit_tokens_total", tier="L3", default=0)
    host_written_tokens: int = stat("tier_written_tokens_total", tier="L2", default=0)  # device -> host
    host_evicted_tokens: int = stat("cache_evicted_tokens_total", tier="L2", reason="capacity", default=0)
    store_written_tokens: int = stat("tier_written_tokens_total", tier="L3", default=0)
    store_read_tokens: int = stat("tier_loaded_tokens_total", tier="L3", default=0)
    host_write_s: float = stat("tier_write_seconds_total", tier="L2", default=0.0)
    host_load_s: float = stat("tier_load_seconds_total", tier="L2", default=0.0)
    store_write_s: float = stat("tier_write_seconds_total", tier="L3", default=0.0)
    store_read_s: float = stat("tier_load_seconds_total", tier="L3", default=0.0)
    # what computing the hit tokens would have taken, less what loading them took
    saved_s: float = stat("tier_saved_seconds_total", default=0.0)
    # whose digest did not fit: dropped and computed anew
    host_wrong_pages: int = stat("tier_wrong_pages_total", tier="L2", default=0)
    store_wrong_pages: int = stat("tier_wrong_pages_total", tier="L3", default=0)
    store_errors: int = stat("tier_store_errors_total", default=0)
    # host pages that went to other replicas
    pushed_tokens: int = stat("tier_moved_tokens_total", direction="out", default=0)
    # that others pushed here, and were kept
    received_tokens: int = stat("tier_moved_tokens_total", direction="in", default=0)
    # prompts that were computed because loading was slower, or not over in time
    slow_loads: int = stat("tier_slow_loads_total", default=0)
    # smoothed; 0 until measured
    host_s_per_token: float = 0.0  # host -> device
    store_s_per_token: float = 0.0  # store -> host
    store_latency_s: float = 0.0  # of a read, before its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What one engine's pages have in the layers of one group, which the metrics' label ``group`` names: full, window
    or state (cache/parts.py). A part is a page, or what it has in the window pool, or the states behind it."""

    group: str
    capacity_bytes: int = stat("cache_group_capacity_bytes", default=0)  # all ranks, as the next
    used_bytes: int = stat("cache_group_used_bytes", default=0)
    num_parts: int = stat("cache_group_parts", default=0)
    num_holes: int = stat("cache_group_holes", default=0)  # pages that are not free and have no such part
    num_evicted: int = stat("cache_group_evicted_parts_total", default=0)  # for room; only grows


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStats:
    """The adapters that one engine holds; counters only grow."""

    held: tuple[str, ...]  # by their identities, the one used last at the end
    num_bytes: int = stat("adapters_held_bytes")  # that they take
    num_loads: int = stat("adapter_loads_total")
    num_dropped: int = stat("adapter_drops_total")  # for the room of others
    load_s: float = stat("adapter_load_seconds")  # smoothed seconds to load one; 0 until measured


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of one engine; counters only grow. Turned into metrics and ReplicaViews elsewhere."""

    time_s: float  # monotonic clock of the engine's process
    pool: PoolStats
    num_running: int = stat("scheduler_requests", state="running", row="running", log="running")
    num_waiting: int = stat("scheduler_requests", state="waiting", row="waiting", log="waiting")
    max_running_requests: int = stat("scheduler_running_limit_requests", "scheduler.max_running", row="running_limit")
    # prompt tokens queued that no cache holds, the current chunk's rest included
    waiting_uncached_tokens: int = stat("scheduler_queued_tokens", row="queued_tokens")
    cache_nodes: int = stat("cache_nodes", "store.cache.num_nodes", tier="L1", row="cache_nodes")
    cache_event_seq: int = stat(of="store.event_seq")
    # counters
    num_finished: int = stat("scheduler_finished_requests_total", "counters.finished", outcome="ok", log="finished")
    num_aborted: int = stat("scheduler_finished_requests_total", "counters.aborted", outcome="cancelled")
    num_errors: int = stat("scheduler_finished_requests_total", "counters.errors", outcome="error")
    num_retractions: int = stat("scheduler_retractions_total", "counters.retractions")
    retracted_tokens: int = stat("scheduler_retracted_tokens_total", "counters.retracted_tokens")
    prefill_tokens: int = stat("scheduler_tokens_total", "counters.prefill_tokens", kind="prefill_computed")  # computed
    # reused instead of computed
    cached_tokens: int = stat("scheduler_tokens_total", "counters.cached_tokens", kind="prefill_cached")
    lookup_tokens: int = stat("cache_lookup_tokens_total", "counters.lookup_tokens")  # prompt tokens looked up
    decode_tokens: int = stat("scheduler_tokens_total", "counters.decode_tokens", kind="decode")
    evicted_tokens: int = stat("cache_evicted_tokens_total", "store.evicted_tokens", tier="L1", reason="capacity")
    num_extend_steps: int = stat(of="steps.num_extend")
    num_decode_steps: int = stat(of="steps.num_decode")
    extend_s: float = stat("scheduler_busy_seconds_total", "steps.extend_s", phase="prefill")  # time in extend steps
    decode_s: float = stat("scheduler_busy_seconds_total", "steps.decode_s", phase="decode")
    alloc_failures: int = stat("kv_pool_alloc_failures_total", "store.alloc_failures", tier="L1")
    # smoothed rates; 0 until measured
    prefill_tokens_per_s: float = stat(of="steps.prefill_tokens_per_s", row="prefill_tokens_per_s")
    decode_step_s: float = stat(of="steps.decode_step_s", row="decode_step_s")
    # KV transfers; ``transfer`` is None where the engine takes part in none
    # decode legs that wait for row and pages
    num_preallocating: int = stat(
        "scheduler_requests", "queues.prealloc", state="preallocating", row="preallocating", default=0
    )
    # decode legs whose K/V is on its way
    num_receiving: int = stat("scheduler_requests", state="receiving", row="receiving", default=0)
    # prefill legs that wait for their receiver, are computed, or drain
    num_handing_off: int = stat("scheduler_requests", state="handing_off", row="handing_off", default=0)
    transfer: TransferStats | None = None
    # of the extend steps: running requests made a token in them too
    num_mixed_steps: int = stat("scheduler_mixed_steps_total", "steps.num_mixed", default=0)
    # that left the prefix cache because it was emptied; ``evicted_tokens``: for room
    flushed_tokens: int = stat(
        "cache_evicted_tokens_total", "store.flushed_tokens", tier="L1", reason="flush", default=0
    )
    # requests whose output is held to a constraint, so far
    num_constrained: int = stat("scheduler_constrained_requests_total", "counters.constrained", default=0)
    # of their outputs, taken without a choice
    forced_tokens: int = stat("scheduler_forced_tokens_total", "counters.forced_tokens", default=0)
    # guessed tokens that rows of decode steps tried, and of them those that came true, by source (scheduler/tokens.py)
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    # smoothed, of a request in a decode step: beyond 1 where drafts come true
    tokens_per_step: float = stat(of="steps.tokens_per_step", default=1.0)
    longest_step_s: float = stat(of="steps.longest_s", default=0.0)  # of the recent steps (engine/stepping.py)
    # smoothed prompt tokens of the steps that ``prefill_tokens_per_s`` comes from
    rate_step_tokens: float = stat(of="steps.rate_step_tokens", default=0.0)
    tiers: TierStats | None = None  # None where the engine has no tier under its device pool
    # what keeps waiting requests from starting: pool, slots; "" if nothing does
    blocked: str = stat(of="scheduler.blocked", row="blocked", default="")
    # of the idle pool, which found pages or rows lost
    failed_checks: int = stat("kv_pool_failed_checks_total", "store.failed_checks", tier="L1", default=0)
    failed_steps: int = stat("scheduler_failed_steps_total", default=0)  # that the engine outlived
    late_uncached_tokens: int = 0  # of the queued ones, of late requests, before which one goes that can be in time
    # of scheduler.policy on_time; 0 under the other orders
    late_factor: float = stat(of="queues.waiting.late_factor", default=0.0)
    # batch requests; no other count of waiting requests has those that wait here
    num_offline_waiting: int = 0
    num_offline_running: int = 0  # of ``num_running``, paused ones too
    offline_pages: int = 0  # of the pool's used pages, those that batch requests alone hold, at the least
    adapters: AdapterStats | None = None  # None where none can be served
    groups: tuple[GroupStats, ...] = ()  # those that the model has

    @property
    def num_handed_over(self) -> int:
        """The requests of KV transfers, which neither run nor wait for this engine."""
        return self.num_preallocating + self.num_receiving + self.num_handing_off


SECONDS = (.0001, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip


class Tally:
    """A distribution over fixed buckets, kept as counts alone, which sum to the number of its values; about 0.2 us a
    value. One thread adds; any may `read`, and may then miss the value being added."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds, rising, inclusive; above the last there is one more bucket."""
        assert list(bounds) == sorted(set(bounds)), f"bounds must rise: {bounds}"
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def add_many(self, value: float, times: int) -> None:
        """Add ``times`` equal values."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def read(self) -> "TallyCounts":
        return TallyCounts(bounds=self.bounds, counts=tuple(self._counts), total=self._total)


@dataclass(frozen=True, slots=True, kw_only=True)
class TallyCounts:
    """A `Tally` at one moment."""

    bounds: tuple[float, ...]  # upper bounds, rising
    counts: tuple[int, ...]  # [len(bounds) + 1] values in each bucket; the last is above every bound
    total: float  # sum of all values


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTallies:
    """The distributions of one engine since its start; they only grow. Metrics are made from them elsewhere."""

    prefill_step_s: TallyCounts = stat("scheduler_step_duration_seconds", phase="prefill")
    decode_step_s: TallyCounts = stat("scheduler_step_duration_seconds", phase="decode")
    prefill_batch_requests: TallyCounts = stat("scheduler_batch_requests", phase="prefill")
    decode_batch_requests: TallyCounts = stat("scheduler_batch_requests", phase="decode")
    prefill_batch_tokens: TallyCounts = stat("scheduler_batch_tokens", phase="prefill")
    decode_batch_tokens: TallyCounts = stat("scheduler_batch_tokens", phase="decode")
    # time since the last use of tree nodes that were evicted for room
    evicted_idle_s: TallyCounts = stat("cache_evicted_idle_seconds", tier="L1")
    # KV transfers; empty where the engine takes part in none
    grant_s: TallyCounts  # decode legs: until row and pages were granted
    wait_s: TallyCounts  # decode legs: from then until all had come, or failed
    post_s: TallyCounts  # each write of pages: NIXL's own time to post it
    wire_s: TallyCounts  # each write of pages: NIXL's own time until it was there


@dataclass(frozen=True, slots=True, eq=False)
class PartWrite:
    """The K and V that window layers keep of ``pages`` now live in pages ``parts`` of their own pool."""

    pages: npt.NDArray[np.int32]  # [n]
    parts: npt.NDArray[np.int32]  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class StateCopy:
    """The recurrent states behind the first ``num_tokens`` tokens of a row are copied to a snapshot, or from it. Made
    once, though a step that failed brings it again."""

    number: int  # ascending
    row: int
    num_tokens: int
    pages: npt.NDArray[np.int32]  # in which the snapshot lies
    snapshot: int  # the number of the copy that fills it: this one, or it is read

    @property
    def from_snapshot(self) -> bool:
        return self.snapshot != self.number
