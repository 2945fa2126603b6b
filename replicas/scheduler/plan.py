"""The plan of one step and its result: host data, picklable; every tensor-parallel rank receives the plan.

Owns:      nothing; these are values.
Invariant: every slot that a plan writes belongs to the request whose row it is. No two rows of a plan write one slot,
           and no two ``table_writes`` one position of a row. Each rank enters the slots of decode rows into its table
           itself, at the last position of the row's sequence, before the step: they are not among the
           ``table_writes``, but for those of drafts, whose writes name the same cells with the same values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from replicas.types import PartWrite, PoolingParams, SamplingParams, StateCopy, TokenIds, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixGroup:
    """Rows of one step with the same slots at positions [0, length): attention reads that K and V once for all of them.

    A row is in at most one group.
    """

    members: npt.NDArray[np.int32]  # [n] indices into the step's rows, ascending, n >= 2
    length: int  # tokens, whole pages, in the pool before the step for every member


BROKEN = -1  # in StepResult.token_ids: the row's logits held NaN or inf, or nothing was left to choose
# prompt tokens of a step whose logprobs are wanted, at most: each needs a row of vocabulary-wide logits, and memory for
# so many is set aside (runner/set_aside.py)
LOGITS_CHUNK = 512
Slots = npt.NDArray[np.int32]  # [n] KV slots: page * page_size + offset


@dataclass(frozen=True, slots=True, eq=False)
class TableWrite:
    """Positions [start, start + len(slots)) of a row of the ReqToTokenPool now live in ``slots``."""

    row: int
    start: int
    slots: Slots


TableWrites = tuple[TableWrite | PartWrite | StateCopy, ...]  # of parts first


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendRow:
    """One request's share of an extend step; positions are absolute."""

    row: int  # row of the ReqToTokenPool
    token_ids: TokenIds  # [E] tokens to run now, E >= 1
    prefix_len: int  # tokens already in the pool before this step
    slots: Slots  # [E] pool slot that receives each token's K/V
    sample: bool  # the last token's logits are wanted (last chunk)
    target_ids: TokenIds | None = None  # [P] prompt tokens whose logprob is wanted, at consecutive positions
    target_start: int = 0  # position of target_ids[0]; the logits at target_start - 1 predict it
    top_logprobs: int = 0  # alternatives wanted beside each target
    pooling: PoolingParams | None = None  # of the hidden states; every chunk's go to the pooler
    adapter: str = ""  # by its identity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtendPlan:
    """Run new tokens over prefixes; ``sampling`` has one entry per row with ``sample``, in row order.

    In a mixed step the last ``num_decode`` rows are of running requests: one token each, sampled. The first
    ``num_forced`` are of requests that ran too: the tokens that their grammar forced.
    """

    table_writes: TableWrites  # to apply before the step
    rows: tuple[ExtendRow, ...]
    sampling: tuple["SampleRow", ...]
    num_decode: int = 0
    num_forced: int = 0
    prefix_groups: tuple[PrefixGroup, ...] = ()  # among the last num_decode rows; members count from the first row
    prompt_groups: tuple[PrefixGroup, ...] = ()  # among the rows before them

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows[self.num_forced : len(self.rows) - self.num_decode])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """One token for each running request; ``seq_lens`` count the new token.

    Behind the rows of the B requests lie those that try drafts: rows of the same requests, each one token further, with
    a guess as its input. Such a row counts if the one before it counts and sampled just that.

    A plan made while the step before it is under way does not know its input: row b's is what the step launched before
    it sampled at ``follows[b]`` (0 for what is BROKEN there), and ``token_ids[b]`` stands for nothing.
    """

    table_writes: TableWrites
    rows: npt.NDArray[np.int32]  # [R] rows of the ReqToTokenPool, R = B without drafts
    token_ids: TokenIds  # [R]
    seq_lens: npt.NDArray[np.int32]  # [R] tokens to attend over, the new one included
    slots: Slots  # [R]
    sampling: tuple["SampleRow", ...]  # [R]
    prefix_groups: tuple[PrefixGroup, ...] = ()
    follows: npt.NDArray[np.int32] | None = None  # [B] indices into the sampled tokens of the step launched before
    draft_rows: tuple[range, ...] = ()  # [B] those of each request's draft, some empty; (): there are none
    adapters: tuple[str, ...] = ()  # [R] by their identities, "" for none; (): no row has one

    @property
    def num_requests(self) -> int:
        return len(self.draft_rows) or len(self.rows)

    def rows_of(self, request: int) -> list[int]:
        """List the rows of a request, in the order of their positions."""
        return [request, *(self.draft_rows[request] if self.draft_rows else ())]


StepPlan = ExtendPlan | DecodePlan


def idle_extend(row: int, num_tokens: int) -> ExtendPlan:
    """Plan a prompt of ``num_tokens``, all in the sink; ``row`` of the table is zeros."""
    zeros = np.zeros(num_tokens, dtype=np.int32)
    whole = ExtendRow(row=row, token_ids=zeros, prefix_len=0, slots=zeros, sample=True)
    return ExtendPlan(table_writes=(), rows=(whole,), sampling=())


def idle_decode(size: int, *, row: int = 0, seq_len: int = 1) -> DecodePlan:
    """Plan a decode step of ``size`` requests that read and write the sink alone; ``row`` of the table is zeros."""
    zeros = np.zeros(size, dtype=np.int32)
    return DecodePlan(
        table_writes=(),
        rows=zeros + np.int32(row),
        token_ids=zeros,
        seq_lens=zeros + np.int32(seq_len),
        slots=zeros,
        sampling=(),
    )


class SampleRow(NamedTuple):
    """What the sampler needs for one token; only rank 0 reads it. A tuple: one is made for every token.

    ``mask`` returns a bit for each token, set if the constraint allows it next, [>= ceil(V / 32)]; None: it allows all.
    ``prompt_ids`` and ``output_ids`` are views of the request's own buffer, read only when penalties or bad words
    ask for them.
    """

    params: SamplingParams
    position: int  # absolute position of the token to be sampled; with the seed it fixes the random number
    num_output: int  # output tokens so far (for min_new_tokens)
    stop_ids: frozenset[int]  # ids masked out while num_output < min_new_tokens
    prompt_ids: TokenIds
    output_ids: TokenIds
    return_logprobs: bool = False
    top_logprobs: int = 0
    mask: "Callable[[], npt.NDArray[np.int32] | None] | None" = None  # waits for the mask of a constrained output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """Sampled tokens, in the order of the plan's ``sampling``."""

    token_ids: TokenIds  # [S]; BROKEN where no token could be chosen
    logprobs: tuple[TokenLogprob | None, ...] = ()  # [S] when any row asked, else empty
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # by index into plan.rows


class PendingStep(Protocol):
    """A step that was launched; it may still be under way on the device."""

    def result(self) -> StepResult:
        """Wait until the step's tokens are on the host, and return them. To be called once, in the order of launch."""
        ...


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step whose launch or sampling failed, or that is to be run again: its result is the error."""

    error: BaseException
    follows: bool = False  # it did not fail itself: it was made ahead of the outcome of one that did

    def result(self) -> StepResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that was over when its launch returned, as on a CPU."""

    made: StepResult

    def result(self) -> StepResult:
        return self.made
