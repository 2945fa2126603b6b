"""Runs a failed step again in parts: finds which of its requests are at fault, and the results of the others.

Owns:      nothing; stepping.py keeps the counts, and ends requests.
Never:     changes a request, a page or a queue. A step that failed has committed nothing: its rows are run again as
           they were planned, into the same slots.
Invariant: the result of a request is that of its own rows, whichever others run beside it. The table writes of the
           step, which are of other requests too, are made with the first part that works, or on the dummy page.
Thread:    engine thread only.

    step fails ─> its open requests in two halves ─> a half that fails, in two halves ... ─> one that fails alone ends
                                                 └─> the others have their tokens
    all fail, or none is open
              ─> a step on the dummy page works: theirs is the fault; it fails: the engine's
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from replicas.request import Req
from replicas.scheduler.decode import sample_row
from replicas.scheduler.plan import (
    DecodePlan,
    PendingStep,
    SampleRow,
    StepPlan,
    StepResult,
    TableWrites,
    idle_decode,
    idle_extend,
)
from replicas.scheduler.tokens import require_fault
from replicas.types import SamplingParams, TokenLogprob

Launch = Callable[[StepPlan], PendingStep]  # starts a plan on all ranks
# steps that failed with all of their requests; the next such one ends the engine, though it works on the dummy page:
# what is broken may be no request's fault, and others compute elsewhere
MOST_IN_A_ROW = 16


@dataclass(frozen=True, slots=True)
class FailedSteps:
    """The number of steps that failed and did not end the engine."""

    num: int = 0
    in_a_row: int = 0  # of the last ones, in which every request was at fault

    def after(self, *, failed: bool, all_at_fault: bool) -> "FailedSteps":
        """Return the numbers after one step more."""
        return FailedSteps(self.num + failed, self.in_a_row + 1 if all_at_fault else 0)


def run_again(
    plan: StepPlan, reqs: Sequence[Req], launch: Launch, may_fail: Callable[[BaseException], bool] = lambda error: True
) -> tuple[StepResult, dict[Req, BaseException]]:
    """Run the open requests of a step that failed again, in halves of halves, until each has a result or fails alone.

    Args:    may_fail: with which errors a part of it may fail, so that others may run.
    Returns: the result as of the whole step, with nothing for requests that ended or fail; why each of these fails.
    Raises:  the error of a part that may not fail with it.
    """
    plan = _with_inputs(plan, reqs)
    token_ids = np.zeros(len(plan.sampling), np.int32)
    logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
    prompt_logprobs, faults = dict[int, tuple[TokenLogprob, ...]](), dict[Req, BaseException]()
    left = [index for index, req in enumerate(reqs) if req.finish is None]
    parts = _halves(left)
    while parts:
        which = parts.pop()
        part, places = _part(plan, which)
        try:
            made = launch(part).result()
        except BaseException as error:
            require_fault(error)
            if not may_fail(error):
                raise
            if len(which) > 1:
                parts += _halves(which)
            else:
                faults[reqs[which[0]]] = error
            continue
        token_ids[places] = made.token_ids
        for place, logprob in zip(places, made.logprobs, strict=False):
            logprobs[place] = logprob
        prompt_logprobs |= {which[row]: found for row, found in made.prompt_logprobs.items()}
    return StepResult(token_ids=token_ids, logprobs=tuple(logprobs), prompt_logprobs=prompt_logprobs), faults


def try_idle(launch: Launch, row: int, writes: TableWrites) -> None:
    """Make the ``writes`` of a step of which no part has run; run a prompt and a token on the dummy page, and sample.
    ``row`` of the table is zeros. Raises: what that does."""
    none = np.zeros(0, np.int32)
    sample = SampleRow(SamplingParams(), 2, 0, frozenset(), none, none, return_logprobs=True)
    for plan in (replace(idle_extend(row, 2), table_writes=writes), idle_decode(1, row=row, seq_len=2)):
        launch(replace(plan, sampling=(sample,))).result()


def _halves(which: list[int]) -> list[list[int]]:
    middle = len(which) // 2
    return [part for part in (which[middle:], which[:middle]) if part]


def _with_inputs(plan: StepPlan, reqs: Sequence[Req]) -> StepPlan:
    """Fill in what a plan that was made ahead did not know: the tokens of the step before, which are taken in now."""
    if not isinstance(plan, DecodePlan) or plan.follows is None:
        return plan
    pairs = list(zip(reqs, plan.seq_lens.tolist(), strict=True))
    assert all(req.num_tokens == length for req, length in pairs if req.finish is None), "a step is not taken in yet"
    token_ids = [0 if req.finish is not None else req.ids[length - 1] for req, length in pairs]
    rows = tuple(sample_row(req) for req in reqs)
    return replace(plan, follows=None, token_ids=np.array(token_ids, np.int32), sampling=rows)


def _part(plan: StepPlan, which: Sequence[int]) -> tuple[StepPlan, list[int]]:
    """Cut out the requests ``which``, by their places among those of the step. Returns: their step, with all writes of
    the table, which change nothing the second time; the places of its tokens among those of the whole step."""
    if isinstance(plan, DecodePlan):
        rows, draft_rows = list(which), list[range]()
        for drafted in (plan.draft_rows[request] for request in which) if plan.draft_rows else ():
            draft_rows.append(range(len(rows), len(rows) + len(drafted)))
            rows += drafted
        of_requests = replace(
            plan,
            rows=plan.rows[rows],
            token_ids=plan.token_ids[rows],
            seq_lens=plan.seq_lens[rows],
            slots=plan.slots[rows],
            sampling=tuple(plan.sampling[row] for row in rows),
            prefix_groups=(),
            draft_rows=tuple(draft_rows),
            adapters=tuple(plan.adapters[row] for row in rows) if plan.adapters else (),
        )
        return of_requests, rows
    place = np.cumsum([row.sample for row in plan.rows]) - 1  # of the token of each row that is sampled
    places = [int(place[index]) for index in which if plan.rows[index].sample]
    first_decode = len(plan.rows) - plan.num_decode
    part = replace(
        plan,
        rows=tuple(plan.rows[index] for index in which),
        sampling=tuple(plan.sampling[index] for index in places),
        num_decode=sum(index >= first_decode for index in which),
        num_forced=sum(index < plan.num_forced for index in which),
        prefix_groups=(),
        prompt_groups=(),
    )
    return part, places
