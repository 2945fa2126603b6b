"""Decode: the step that makes one token for each running request, and which request is retracted when pages run out.

Owns:      whether the queues must be looked at before another step may be planned ahead; the prefix
           groups of the last batch: running requests that begin with the same pages, so that attention reads those
           once for all of them. The groups hold until a request joins, leaves, or commits more tokens. Those of
           prompts are found anew for each step.
Never:     changes the tree. A split of a node changes no group, since each request keeps the path that it locked. Takes
           pages that a peer may read: a prefill leg that has begun is never retracted.
Invariant: a running request lacks exactly one token's K/V: that of its last token. A retracted request waits again,
           keeps its tokens and holds nothing; one request always keeps going. A group's members have the first
           ``length`` slots in common, all within what each has locked; no request is in two groups.
Thread:    scheduler thread only.
Source:    SGLang retract_decode. Cascade attention, Ye et al. 2024 (flashinfer.ai/2024/02/02/cascade-inference.html);
           Hydragen, Juravsky et al. 2024 (arXiv:2402.05099). One level: of nested groups, those that save most.

A step may be planned ahead, before the tokens of the one under way are known: only when it would be one more token of
every running request and nothing else. Every request of it is in the step before it; only an end can come between.

    schedule ─> step n ─────────────> apply(n)
         ahead ─> step n + 1, before apply(n) ──> apply(n + 1): requests that ended at n are passed over, and let go now
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replicas.cache.base import Lock
from replicas.cache.kv import KvCache
from replicas.cache.node import TreeNode
from replicas.request import Guide, Req, ReqState
from replicas.scheduler.budget import NewTokenRatio
from replicas.scheduler.plan import DecodePlan, PrefixGroup, SampleRow, Slots, TableWrite, TableWrites
from replicas.scheduler.queues import Queues
from replicas.scheduler.tokens import Counters
from replicas.scheduler.victims import Need, victims
from replicas.types import TokenIds

MIN_LEN = 256  # tokens; where sharing begins to pay on a CPU (docs/log/2026-11-22-cpu-kernels.md, Cascade)


MIN_DRAFT_LEN = 128  # tokens before a draft that its rows read together: what the CPU's kernel shares at least


class DecodeRows(NamedTuple):
    """The rows of a decode step, each [B] int32, or [R] with those of drafts."""

    rows: npt.NDArray[np.int32]  # of the ReqToTokenPool
    token_ids: TokenIds  # 0 in a step planned ahead, whose input is not known yet
    seq_lens: npt.NDArray[np.int32]
    slots: Slots

    def of(self, reqs: Sequence[Req], before: Sequence[Req]) -> "DecodeRows":
        """Return the rows of ``reqs``, which stand in ``before`` in the same order; these are of ``before``."""
        if len(reqs) == len(before):
            return self
        stay = set(reqs)
        places = [at for at, req in enumerate(before) if req in stay]
        return DecodeRows(*(each[places] for each in self))

    def and_draft(self, request: int, token_ids: TokenIds, slots: Slots) -> "DecodeRows":
        """Add the rows of a draft of request ``request``: ``token_ids`` [k] follow its own token."""
        seq_len = self.seq_lens[request] + np.int32(1)
        return DecodeRows(
            np.append(self.rows, np.full(len(slots), self.rows[request])),
            np.append(self.token_ids, token_ids),
            np.append(self.seq_lens, np.arange(seq_len, seq_len + len(slots), dtype=np.int32)),
            np.append(self.slots, slots),
        )


def decode_rows(reqs: Sequence[Req], kv: KvCache, *, ahead: bool = False) -> DecodeRows:
    """Take a slot for the last token of each of ``reqs`` (SPEC F10); ``ahead``: for the token after it, which the step
    under way samples."""
    slots = kv.extend_decode(reqs)
    held = [req.holding for req in reqs if req.holding is not None]
    rows = np.array([holding.row for holding in held], dtype=np.int32)
    seq_lens = np.array([holding.kv_len for holding in held], dtype=np.int32)
    last = [0 if ahead else req.ids[req.num_tokens - 1] for req in reqs]
    return DecodeRows(rows, np.array(last, dtype=np.int32), seq_lens, slots)


def decode_plan(
    reqs: Sequence[Req],
    rows: DecodeRows,
    table_writes: TableWrites,
    groups: tuple[PrefixGroup, ...],
    *,
    follows: npt.NDArray[np.int32] | None = None,
    draft_rows: tuple[range, ...] = (),
    of_drafts: Sequence[SampleRow] = (),
) -> DecodePlan:
    """Plan a decode step of ``reqs``; ``follows``: it is planned ahead. ``draft_rows``: as in the plan; ``of_drafts``:
    what the sampler needs for these."""
    sampling = [sample_row(req, num_ahead=0 if follows is None else 1) for req in reqs]
    adapters = adapters_of(reqs)
    if adapters and draft_rows:
        adapters += tuple(adapters[i] for i, drafted in enumerate(draft_rows) for _ in drafted)
    return DecodePlan(
        table_writes=table_writes,
        rows=rows.rows,
        token_ids=rows.token_ids,
        seq_lens=rows.seq_lens,
        slots=rows.slots,
        sampling=(*sampling, *of_drafts),
        prefix_groups=groups,
        follows=follows,
        draft_rows=draft_rows,
        adapters=adapters,
    )


def adapters_of(reqs: Sequence[Req]) -> tuple[str, ...]:
    """Name the adapter of each request, "" for none; () where none has one."""
    found = tuple("" if req.asked.adapter is None else req.asked.adapter.identity for req in reqs)
    return found if any(found) else ()


def sample_row(req: Req, num_ahead: int = 0, num_drafted: int = 0, guide: Guide | None = None) -> SampleRow:
    """Collect what the sampler needs to choose the next token of ``req``, or the one ``num_ahead`` after it: those
    between are not known, or are the first ``num_drafted`` of its draft, behind which ``guide`` stands."""
    guide = guide or req.guide
    num_tokens, prompt_len, ids = req.num_tokens + num_drafted, req.prompt_len, req.ids
    return SampleRow(
        req.sampling,
        num_tokens + num_ahead,
        num_tokens - prompt_len + num_ahead,
        req.stop_ids,
        ids[:prompt_len],
        ids[prompt_len:num_tokens],
        req.return_logprobs,
        req.top_logprobs,
        None if guide is None else guide.words,
    )


def retract_until_it_fits(queues: Queues, kv: KvCache, ratio: NewTokenRatio, counters: Counters) -> bool:
    """Free pages until each running request can have one more token (SPEC F11). Returns: whether any was retracted.

    Running requests go first, but one stays, unless a prompt in progress can be retracted in its place. A prompt that
    is a prefill leg cannot: its pages may be on their way.
    """
    retracted, running = False, queues.running
    while running and kv.pages_needed_decode(running) * kv.page_size > kv.store.available_tokens():
        highest = max(running, key=lambda req: req.level)
        for victim in victims(Need.TOKEN, highest, queues, kv):
            retract(victim, queues, kv, counters)
        retracted = True
    if retracted:
        ratio.retracted(running)
    return retracted


def retract(req: Req, queues: Queues, kv: KvCache, counters: Counters, *, kept: bool = False) -> None:
    """Take the pages of a request in prefill or decode back; it waits again and keeps its tokens. ``kept``: it gives a
    step away, and no memory, so its pages stay cached and do not count as lost."""
    assert not req.is_prefill_leg, f"prefill leg {req.rid}: its pages may be on their way"
    queues.remove(req)
    if not (req.in_background or kept):  # the former gives way to every other, which says nothing of the pool
        counters["retractions"] += 1
        counters["retracted_tokens"] += req.computed_len
    req.num_retractions += 1
    req.prompt_logprobs.clear()
    kv.release(req, keep=True)
    req.move(ReqState.WAITING)
    queues.waiting.add(req)


def take_slots(queues: Queues, kv: KvCache, ratio: NewTokenRatio, counters: Counters) -> tuple[bool, DecodeRows | None]:
    """Take a slot for the next token of each running request. Returns: whether any was retracted for it; the rows, or
    None when none runs."""
    gave_way = retract_until_it_fits(queues, kv, ratio, counters)
    if not queues.running:
        return gave_way, None
    ratio.decode_step()
    if queues.adapters is not None:  # the rows of an adapter lie side by side, and are multiplied together
        queues.running.sort(key=lambda req: "" if req.asked.adapter is None else req.asked.adapter.identity)
    return gave_way, decode_rows(queues.running, kv)


def table_writes(kv: KvCache) -> TableWrites:
    """Take what is to be written into the ranks' tables before the next step."""
    writes = tuple(TableWrite(row, start, slots) for row, start, slots in kv.table.drain_writes())
    return writes if kv.store.parts is None else (*kv.store.parts.drain(), *writes)


class SharedPrefixes:
    """The prefix groups of the last batch, found again only when the batch changes."""

    def __init__(self) -> None:
        self._locks: list[object] = []  # of the last batch
        self._groups: tuple[PrefixGroup, ...] = ()

    def groups(
        self, reqs: Sequence[Req], *, first: int = 0, min_saved: int = 0, min_len: int = MIN_LEN
    ) -> tuple[PrefixGroup, ...]:
        """Return the groups among ``reqs``, the first of which is the step's row ``first``. ``min_saved``: tokens that
        a group must save reading; what the group costs depends on the device. The bounds are those of every call.

        Costs O(B) pointer comparisons, or, when a request joined or left, O(B * nodes on a path).
        """
        locks = [req.holding.lock if req.holding is not None else None for req in reqs]
        if locks != self._locks:
            found = find_groups([_locked(lock) for lock in locks], min_len)
            worth = (group for group in found if (len(group.members) - 1) * group.length >= min_saved)
            self._locks, self._groups = locks, tuple(worth)
        if not first:
            return self._groups
        return tuple(replace(group, members=group.members + np.int32(first)) for group in self._groups)


def draft_groups(
    groups: Sequence[PrefixGroup], draft_rows: Sequence[range], seq_lens: npt.NDArray[np.int32], *,
    page_size: int, min_saved: int,
) -> tuple[PrefixGroup, ...]:  # fmt: skip
    """Let the rows of each draft read what is before them together, where that saves ``min_saved`` tokens. Such a
    request leaves its group among ``groups``: a row is in one at most."""
    own, left = [], set[int]()
    for request, rows in enumerate(draft_rows):
        length = (int(seq_lens[request]) - 1) // page_size * page_size  # its own token is made in this step
        if length >= MIN_DRAFT_LEN and len(rows) * length >= max(min_saved, 1):
            own.append(PrefixGroup(members=np.array([request, *rows], dtype=np.int32), length=length))
            left.add(request)
    stay = (replace(group, members=group.members[~np.isin(group.members, list(left))]) for group in groups)
    return (*(group for group in stay if len(group.members) > 1), *own)


def prompt_groups(reqs: Sequence[Req]) -> tuple[PrefixGroup, ...]:
    """Find the groups among ``reqs``, which extend: prompts with one cached prefix."""
    locks = [req.holding.lock for req in reqs if req.holding is not None]
    return find_groups([_locked(lock) for lock in locks], MIN_LEN) if len(locks) > 1 else ()


def find_groups(nodes: Sequence[TreeNode], min_len: int) -> tuple[PrefixGroup, ...]:
    """Find the groups of at least ``min_len`` tokens among requests that have locked ``nodes`` [B]."""
    branches = _branches(nodes)
    found: list[_Group] = []
    for branch in sorted(branches.values(), key=lambda branch: branch.length, reverse=True):  # children first
        if branch.length >= min_len:
            branch.settle()
        parent = branch.node.parent
        assert parent is not None
        if parent in branches:
            branches[parent].loose += branch.loose
            branches[parent].groups += branch.groups
        else:
            found += branch.groups
    return tuple(
        PrefixGroup(members=np.array(sorted(group.members), dtype=np.int32), length=group.length) for group in found
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    members: list[int]
    length: int  # tokens

    @property
    def saved(self) -> int:
        """The number of tokens that attention need not read."""
        return (len(self.members) - 1) * self.length


@dataclass(slots=True, eq=False)
class _Branch:
    """A node of the paths: the requests in its subtree that are in no group yet, and the groups there."""

    node: TreeNode
    length: int  # tokens from the root to the node's end
    loose: list[int] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)

    def settle(self) -> None:
        """Group the loose requests, and with them the members of groups that save less than sharing this prefix."""
        absorbed = [group for group in self.groups if len(group.members) * self.length > group.saved]
        joined = _Group([*self.loose, *(member for group in absorbed for member in group.members)], self.length)
        if joined.saved > sum(group.saved for group in absorbed):
            self.groups = [group for group in self.groups if group not in absorbed] + [joined]
            self.loose = []


def _branches(nodes: Sequence[TreeNode]) -> dict[TreeNode, _Branch]:
    """Collect every node on the path from a root (left out) to one of ``nodes``."""
    branches: dict[TreeNode, _Branch] = {}
    for index, node in enumerate(nodes):
        path, step = [], node
        while step.parent is not None and step not in branches:
            path.append(step)
            step = step.parent
        length = branches[step].length if step in branches else 0
        for step in reversed(path):
            length += len(step.key)
            branches[step] = _Branch(step, length)
        if node in branches:
            branches[node].loose.append(index)
    return branches


def _locked(lock: object) -> TreeNode:
    assert isinstance(lock, Lock), "a running request holds a locked path"
    return lock.node


LOOK_AGAIN = 16  # steps; a request that waits for memory may fit although none ended, as reservations shrink


class AheadGate:
    """Whether requests that wait may be passed over: none of them can start, and nothing was freed since."""

    def __init__(self) -> None:
        self._num_left = 0  # steps that may be planned until the queues are looked at

    @property
    def must_look(self) -> bool:
        return self._num_left == 0

    def looked(self) -> None:
        """Note that the queues were looked at, and none of their requests can start."""
        self._num_left = LOOK_AGAIN

    def planned(self) -> None:
        """Note a step that was planned without a look at the queues."""
        self._num_left = max(self._num_left - 1, 0)

    def disturb(self) -> None:
        """Note that a request came or ended: one that waits may be able to start."""
        self._num_left = 0


def plan_ahead(queues: Queues, kv: KvCache, *, must_look: bool) -> tuple[list[Req], npt.NDArray[np.int32]] | None:
    """Choose the requests of the next decode step while one is under way.

    Returns: the requests that make one more token, and their places in the step under way; None if something else may
             have to run first, or if a token must be known to make the next one.
    """
    has_queue = len(queues.waiting) > 0 or len(queues.prealloc) > 0
    if len(queues.under_way) != 1 or queues.begun or (has_queue and must_look):
        return None
    reqs = [req for req in queues.running if req.max_remaining > 1]  # else the step under way may make its last token
    if not reqs or any(_needs_host(req) for req in reqs):
        return None
    if has_queue and len(reqs) < len(queues.running):
        return None  # a request is about to end, which frees memory for one that waits
    if kv.pages_needed_decode(reqs) * kv.page_size > kv.store.available_tokens():
        return None
    follows = _places(reqs, queues.under_way.newest)
    return None if follows is None else (reqs, follows)  # None: one has joined, whose token is not of that step


def _needs_host(req: Req) -> bool:
    """Whether the token after the one under way needs the host: which bad words it may not end depends on that token.
    The launch of such a step would wait for the one before it, whose tokens would then be a step late. Penalties depend
    on it too, but are counted where it is (runner/token_counts.py). So do the masks of constraints, but sampling waits
    for them, and the forward does not (runner/model_runner.py)."""
    return bool(req.sampling.bad_words)


def _places(reqs: list[Req], before: list[Req]) -> npt.NDArray[np.int32] | None:
    """[B] the place of each of ``reqs`` in ``before``; None if one is not there."""
    if reqs == before:
        return np.arange(len(reqs), dtype=np.int32)
    place = {id(req): index for index, req in enumerate(before)}
    found = [place.get(id(req)) for req in reqs]
    return None if None in found else np.array(found, dtype=np.int32)
