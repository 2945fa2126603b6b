"""Budgets: how many tokens of a step a request may take, and how much memory admission reserves for its output.

The memory rule (SPEC F05): a request is admitted when the tokens it still has to run, plus the share
``new_token_ratio`` of the output it may still make, fit what is free or evictable after the same share is reserved for
each running request. The ratio decays from step to step, and jumps up when a request had to be retracted.
"""

from collections.abc import Iterable

from replicas.request import Req

CLIP_NEW_TOKENS = 4096  # no request reserves more output than this: most stop long before a large limit (SGLang)


class NewTokenRatio:
    """The share of each request's possible output that admission reserves."""

    def __init__(self, *, initial: float, floor: float, decay: float) -> None:
        assert 0.0 <= floor <= initial <= 1.0
        self._initial, self._floor, self._decay = initial, floor, decay
        self.value = initial

    def decode_step(self) -> None:
        """Decay by one step without a retraction."""
        self.value = max(self._floor, self.value - self._decay)

    def retracted(self, running: Iterable[Req]) -> None:
        """Jump up after a retraction: reserve what the survivors have used so far, and 20 steps more.

        Source: SGLang retract_decode (SPEC F11).
        """
        made = room = 0
        for req in running:
            made += req.num_output + 20
            room += max(1, req.sampling.max_new_tokens)
        self.value = max(self.value, min(1.0, made / room)) if room else self._initial

    def idle(self) -> None:
        """Start afresh, as nothing runs."""
        self.value = self._initial

    def reserve(self, req: Req) -> int:
        """Count the tokens to reserve for the output that ``req`` may still make; a prefill leg makes none here."""
        return 0 if req.is_prefill_leg else int(min(req.max_remaining, CLIP_NEW_TOKENS) * self.value)


def least_prompt_tokens(chunk_size: int) -> int:
    """Count the tokens that every step leaves to prompts (a quarter), however many requests run."""
    return -(-chunk_size // 4)


def prompt_tokens(chunk_size: int, num_decode: int, *, page_size: int) -> int:
    """Count the tokens that a step leaves to prompts, beside one for each of ``num_decode`` running requests.

    A step with running requests has half as many tokens: they wait for the whole step, and prompts lose little by it
    (measured: docs/performance.md, Mixed steps). Prompts get whole pages, since their chunks end with pages: the last
    page is filled rather than left.
    """
    if num_decode == 0:
        return chunk_size
    left = max(chunk_size // 2 - num_decode, least_prompt_tokens(chunk_size))
    return -(-left // page_size) * page_size if chunk_size // 2 >= page_size else left


class StepBudget:
    """The tokens that one extend step may still run (SPEC F06: the chunk size)."""

    def __init__(self, num_tokens: int, *, page_size: int) -> None:
        self._left = num_tokens
        self._align = page_size if num_tokens >= page_size else 1

    def grant(self, want: int, *, prefix_len: int) -> int:
        """Count how many of ``want`` tokens may run now; a chunk ends on a page boundary, so its pages can be shared.

        Returns: ``want``, or fewer with (prefix_len + granted) a multiple of the page size (unless the whole step is
        smaller than a page), or 0.
        """
        if want <= self._left:
            return want
        return max(0, (prefix_len + self._left) // self._align * self._align - prefix_len)

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self._left
        self._left -= num_tokens

    @property
    def empty(self) -> bool:
        return self._left <= 0
