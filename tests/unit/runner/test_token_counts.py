"""Penalties and logprobs of steps that follow one whose token the host does not know: the numbers of the host's way."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from replicas.runner.sampler import DeviceLogprobs, Sampler, edit_logits, token_logprobs
from replicas.runner.token_counts import TokenCounts
from replicas.scheduler.plan import BROKEN, SampleRow
from replicas.types import SamplingParams
from tests.gpu.device_steps import DEVICE
from tests.gpu.triton_or_skip import triton_paged

assert triton_paged

VOCAB = 120
PENALTIES = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4,
    logit_bias=((7, 3.0), (9, -2.0)),
)  # fmt: skip


class Request:
    """A request's ids in a buffer of its own, as the scheduler keeps them."""

    def __init__(self, prompt: list[int], params: SamplingParams = PENALTIES) -> None:
        self.ids = np.zeros(100, np.int32)
        self.ids[: len(prompt)] = prompt
        self.prompt_len = self.num = len(prompt)
        self.params = params

    def row(self, *, ahead: int = 0, **changes: object) -> SampleRow:
        made = SampleRow(
            params=self.params, position=self.num + ahead, num_output=self.num - self.prompt_len + ahead,
            stop_ids=frozenset((3,)), prompt_ids=self.ids[: self.prompt_len],
            output_ids=self.ids[self.prompt_len : self.num],
        )  # fmt: skip
        return made._replace(**changes)

    def push(self, token: int) -> None:
        self.ids[self.num] = token
        self.num += 1


def logits(seed: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def steps(sampler: Sampler, requests: list[Request], tokens: list[list[int]]) -> Iterator[None]:
    """Each step ahead of what the host knows; after it the token of the one before comes. ``tokens`` are the host's."""
    last = torch.zeros(len(requests), dtype=torch.int64, device=DEVICE)
    for step, wanted in enumerate(tokens):
        made, _ = sampler.sample_on_device(
            logits(step).to(DEVICE), [req.row(ahead=1 if step else 0) for req in requests], last if step else None
        )
        assert made.tolist() == wanted, f"step {step}"
        if step:
            for req, token in zip(requests, last.tolist(), strict=True):
                req.push(token)
        last = made
        yield


def host_tokens(prompts: list[list[int]], num: int) -> list[list[int]]:
    requests = [Request(prompt) for prompt in prompts]
    made = []
    for step in range(num):
        ids, _ = Sampler(VOCAB, "cpu").sample(logits(step), [req.row() for req in requests])
        made.append(ids.tolist())
        for req, token in zip(requests, ids.tolist(), strict=True):
            req.push(token)
    return made


PROMPTS = [[5, 6, 7, 5], [8]]


def test_penalties_count_tokens_that_the_host_has_not_seen() -> None:
    """Twelve steps, each launched before the token of the one before is known."""
    wanted = host_tokens(PROMPTS, 12)
    assert len({token for step in wanted for token in step}) > 3
    for _ in steps(Sampler(VOCAB, DEVICE), [Request(prompt) for prompt in PROMPTS], wanted):
        pass


def test_a_request_whose_count_does_not_continue_is_counted_anew() -> None:
    """Its state is lost after the fourth step: as if that had been sampled on the host."""
    sampler = Sampler(VOCAB, DEVICE)
    for step, _ in enumerate(steps(sampler, [Request(prompt) for prompt in PROMPTS], host_tokens(PROMPTS, 9))):
        if step == 3:
            sampler._counts._held.clear()


def test_another_request_in_the_place_of_one_that_ended_starts_from_nothing() -> None:
    counts = TokenCounts(VOCAB, torch.device(DEVICE))
    for prompt in ([1, 2, 3], [50, 51]):
        req = Request(prompt)
        req.push(60)
        edited = edit_logits(logits(0, 1).to(DEVICE), [req.row()], counts)
        assert torch.equal(edited.cpu(), edit_logits(logits(0, 1), [req.row()]))
    assert len(counts._held) == 1


def test_penalised_logits_are_those_of_the_host_bit_for_bit() -> None:
    """Twelve rows, of which every third has no penalties."""
    bias = SamplingParams(logit_bias=((1, 1.0),))
    requests = [Request([i, i + 1, 40], PENALTIES if i % 3 else bias) for i in range(12)]
    for i, req in enumerate(requests):
        for token in range(i):
            req.push(token % 4)
    rows = [req.row() for req in requests]
    mine = edit_logits(logits(4, 12).to(DEVICE), rows, TokenCounts(VOCAB, torch.device(DEVICE)))
    assert torch.equal(mine.cpu(), edit_logits(logits(4, 12), rows))


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_made_on_the_device_are_those_of_the_host(num_top: int) -> None:
    """Logits of few values, so that ties stand at the edge of the most likely; the second row did not ask, the last is
    broken."""
    made = (logits(1, 4) / 2).round()
    made[3, 0] = torch.nan
    asks = {"return_logprobs": True, "top_logprobs": num_top}
    rows = [Request([1]).row(**asks), Request([1]).row(), Request([1]).row(**asks | {"top_logprobs": 0}),
            Request([1]).row(**asks)]  # fmt: skip
    tokens = torch.tensor([4, 5, 6, BROKEN])
    on_device = DeviceLogprobs.of(made, tokens, rows)
    told = on_device.told(tokens.numpy(), on_device.tensors)
    wanted = token_logprobs(made[[0, 2]], np.array([4, 6], np.int32), [num_top, 0])
    assert told == (wanted[0], None, wanted[1], None)
