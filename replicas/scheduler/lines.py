"""Lines: those of batches that wait, and how much of a step they may take, so that others hardly notice them.

Owns:      the lines that wait or are paused, and the count of all that are open; what a row of a decode step costs, as
           the engine's steps tell; the seconds that prompts of lines may take beside others that decode.
Never:     chooses lines (queues.py, prefill.py). Looks at requests that are about to begin: no line runs beside those.
Invariant: in steps in which others decode, lines take about SHARE of the time that those take by themselves: their rows
           first, one at least, so that what it costs stays known; what these leave is saved up for their prompts.
Thread:    scheduler thread only.
"""

from collections.abc import Sequence

from replicas.request import Req, ReqQueue
from replicas.scheduler.plan import ExtendPlan, StepPlan

SHARE = 0.25  # of the time of others' decode steps
MOST_ROWS = 1024  # of lines, where rows cost nothing
MEMORY = 500  # steps that count, about, in what rows cost
OUTLIER = 4.0  # a step that took so many times what was expected counts as that


class RowTime:
    """The seconds of a decode step, as a straight line over its rows that is fitted to recent steps."""

    def __init__(self) -> None:
        self._num = 0
        self._rows = self._step_s = 0.0  # moving means
        self._spread = self._slope = 0.0  # moving means of rows' distance from their mean, squared; times seconds'

    def timed(self, num_rows: int, step_s: float) -> None:
        """Take in a step."""
        if self._step_s:
            step_s = min(step_s, OUTLIER * max(self._step_s, self.of(num_rows)))
        self._num = min(self._num + 1, MEMORY)
        weight, rows, seconds = 1 / self._num, num_rows - self._rows, step_s - self._step_s
        self._rows += weight * rows
        self._step_s += weight * seconds
        self._spread = (1 - weight) * (self._spread + weight * rows * rows)
        self._slope = (1 - weight) * (self._slope + weight * rows * seconds)

    @property
    def row_s(self) -> float | None:
        """The seconds that one row more takes; None while all steps had as many."""
        return None if self._spread < 1e-6 else max(self._slope / self._spread, 0.0)

    def of(self, num_rows: int) -> float:
        """Return the seconds of a step of ``num_rows``."""
        return max(self._step_s + (self.row_s or 0.0) * (num_rows - self._rows), 0.0)


def line_tokens(chunk_size: int, page_size: int) -> int:
    """Count the prompt tokens of a step in which only lines of batches begin (an eighth, and a page at least): whoever
    comes meanwhile waits for its end, and lines lose little by it (docs/batches.md)."""
    return max(-(-chunk_size // 8), page_size)


class LineShare:
    """What lines of batches may take of the steps of one engine."""

    def __init__(self, chunk_size: int, *, page_size: int) -> None:
        self.time = RowTime()
        self._most_len = line_tokens(chunk_size, page_size)
        self._page_size = page_size
        self._saved_s = 0.0  # of their share, for prompts

    def num_rows(self, num_others: int) -> int:
        """Count the rows that lines may have beside ``num_others`` that decode."""
        if (row_s := self.time.row_s) is None:
            return 1
        share_s = SHARE * self.time.of(num_others)
        return max(1, int(share_s / row_s)) if row_s * MOST_ROWS > share_s else MOST_ROWS

    def prompt_len(self, num_others: int, s_per_token: float) -> int:
        """Count the tokens of lines' prompts in a step in which ``num_others`` decode.

        Args: s_per_token: of prompts; 0: not known.
        """
        if not num_others:
            return self._most_len
        num_tokens = round(self._saved_s / s_per_token) if s_per_token else 0
        return max(0, min(num_tokens, self._most_len) // self._page_size * self._page_size)

    def ran(self, plan: StepPlan, reqs: Sequence[Req], s_per_token: float) -> None:
        """Take in a step of ``reqs``: what others have decoded lets lines take a share, and what those took counts."""
        first = len(reqs) - plan.num_decode if isinstance(plan, ExtendPlan) else 0
        num_lines = sum(req.asked.offline for req in reqs[first:])
        if not (num_others := len(reqs) - first - num_lines):
            return
        rows = plan.rows[:first] if isinstance(plan, ExtendPlan) else ()
        num_tokens = sum(len(row.token_ids) for req, row in zip(reqs, rows, strict=False) if req.asked.offline)
        taken_s = num_lines * (self.time.row_s or 0.0) + num_tokens * s_per_token
        most_s = self._most_len * s_per_token
        self._saved_s = min(max(self._saved_s + SHARE * self.time.of(num_others) - taken_s, -most_s), most_s)


class LineQueue(ReqQueue):
    """The lines of batches that wait, or are paused between two tokens."""

    def __init__(self, share: LineShare) -> None:
        super().__init__()
        self.share = share
        self.num_open = 0  # lines that have come and not ended, wherever they are: not only those in this queue

    def opened(self) -> None:
        """Count a line that has come."""
        self.num_open += 1

    def ended(self) -> None:
        """Count a line no longer: it has ended."""
        self.num_open -= 1
