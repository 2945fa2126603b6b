"""The gated delta rule and the causal convolution against their definitions in float64, on requests of one step."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from replicas.kernels import gated_delta
from replicas.kernels.gated_delta import convolve, gated_delta_rule

TAPS = 4


def defined_convolution(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """x [T, C] behind the inputs ``before`` [K, C]: silu of the sums."""
    seen = torch.cat([before, x]).double()
    rows = [(seen[t + 1 : t + 1 + TAPS] * weight).sum(dim=0) for t in range(len(x))]
    return torch.nn.functional.silu(torch.stack(rows))


def defined_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other: [T, H, ...] each, g of a head or of its rows, the state [H, D, Dv]. Returns: outputs,
    the last state."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    made = []
    for t in range(len(v)):
        state = state * g[t].view(len(state), -1, 1)
        change = (v[t] - (state * k[t, :, :, None]).sum(dim=1)) * beta[t, :, None]
        state = state + k[t, :, :, None] * change[:, None]
        made.append((state * q[t, :, :, None]).sum(dim=1) / q.shape[-1] ** 0.5)
    return torch.stack(made), state


class Step:
    """Random inputs of requests of some lengths, and what they kept; a request whose number is in ``new`` has nothing.

    Request n reads place 3 n and ends in 3 n + 2.
    """

    def __init__(
        self, lengths: Sequence[int], new: Sequence[int], *, heads: int, k_heads: int, size: int, rows: bool
    ) -> None:
        draw, tokens, num = torch.Generator().manual_seed(5), sum(lengths), 3 * len(lengths)
        channels = (2 * k_heads + heads) * size
        self.x = torch.randn(tokens, channels + 16, generator=draw)[:, :channels]  # rows with something between them
        self.weight = torch.randn(TAPS, channels, generator=draw)
        self.mixed = torch.randn(tokens, channels, generator=draw)
        q, k, v = self.mixed.split([k_heads * size, k_heads * size, heads * size], dim=1)
        self.q, self.k = (x.view(tokens, k_heads, size) for x in (q, k))
        self.v = v.view(tokens, heads, size)
        self.g = torch.rand(tokens, heads, *[size] * rows, generator=draw)
        self.beta = torch.rand(tokens, heads, generator=draw)
        self.inputs = torch.randn(num, TAPS, channels, generator=draw)
        self.states = torch.randn(num, heads, size, size, generator=draw)
        ends = torch.tensor(lengths).cumsum(dim=0).tolist()
        self.bounds = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.reads = [-1 if n in new else 3 * n for n in range(len(lengths))]

    def whole(self) -> Tensor:
        rows = [(*bounds, self.reads[n], 3 * n + 2) for n, bounds in enumerate(self.bounds)]
        return torch.tensor(rows)

    def run(self, segments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return both outputs, and the states that the requests end with."""
        inputs, states = self.inputs.clone(), self.states.clone()
        made = convolve(self.x, self.weight, None, inputs, segments, silu=True)
        out = gated_delta_rule(self.q, self.k, self.v, self.g, self.beta, states, segments)
        return made, out, inputs[2::3], states[2::3]


@pytest.fixture(params=[(4, 2, 32, False), (3, 3, 64, True)], ids=["shared keys", "a decay a row"])
def step(request: pytest.FixtureRequest) -> Step:
    heads, k_heads, size, rows = request.param
    return Step([1, 7, 2, 1, 9], [1, 3], heads=heads, k_heads=k_heads, size=size, rows=rows)


@pytest.mark.parametrize("threads", [1, 2])
def test_each_request_goes_on_from_its_own_state(step: Step, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made, out, inputs, states = step.run(step.whole())
    finally:
        torch.set_num_threads(before)
    share = step.v.shape[1] // step.k.shape[1]
    for n, (start, end) in enumerate(step.bounds):
        at, new = slice(start, end), step.reads[n] < 0
        kept, held = (torch.zeros_like(x[0]) if new else x[3 * n] for x in (step.inputs, step.states))
        sums = defined_convolution(step.x[at], step.weight, kept)
        torch.testing.assert_close(made[at].double(), sums, rtol=1e-5, atol=1e-5)
        assert torch.equal(inputs[n], torch.cat([kept, step.x[at]])[-TAPS:])
        q, k = (x[at].repeat_interleave(share, dim=1) for x in (step.q, step.k))
        wanted, last = defined_rule(q, k, step.v[at], step.g[at], step.beta[at], held)
        torch.testing.assert_close(out[at].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[n].double(), last, rtol=1e-5, atol=1e-5)


def test_no_bit_depends_on_where_a_prompt_is_cut_or_on_who_runs_beside_it(step: Step) -> None:
    made, out, inputs, states = step.run(step.whole())
    for cut in (1, 3, 6):  # of the request of seven tokens: two parts of one step, through its middle place
        start, end = step.bounds[1]
        halves = torch.tensor([(start, start + cut, -1, 4), (start + cut, end, 4, 5)])
        again = step.run(torch.cat([halves, step.whole()[4:], step.whole()[:1]]))
        for ours, whole in zip(again, (made, out, inputs, states), strict=True):
            rows = slice(start, end) if len(ours) == len(step.x) else slice(1, 2)
            assert torch.equal(ours[rows], whole[rows])
    start, end = step.bounds[4]  # nine tokens one by one, through two places in turn
    singles = [(t, t + 1, 12 if t == start else 13 + (t - start) % 2, 14 - (t - start) % 2) for t in range(start, end)]
    one_by_one = step.run(torch.tensor(singles))
    assert torch.equal(one_by_one[1][start:end], out[start:end])
    assert torch.equal(one_by_one[3][4], states[4])


def test_widths_that_fill_no_vector_are_left_to_others() -> None:
    assert gated_delta.serves(96, 16, 32)
    assert not any(gated_delta.serves(*widths) for widths in ((100, 16, 32), (96, 8, 32), (96, 16, 48)))
