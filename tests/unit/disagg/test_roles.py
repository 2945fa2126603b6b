"""Both roles over real schedulers and pools, joined by fake desks."""

import pytest

from replicas.types import FinishReason, HandOffReport
from tests.fakes import continuation
from tests.pair import Pair

pytestmark = pytest.mark.model
PROMPT = list(range(100, 145))  # 45 tokens: 11 whole pages of 4, three chunks of 16


def test_the_decode_side_says_what_one_engine_would_and_the_prefill_side_nothing() -> None:
    """SPEC H08, H16: row and pages first, then the K/V, then the tokens, the first of them from the other side."""
    pair = Pair()
    pair.ask("a", PROMPT)
    pair.run()
    assert pair.decode.ids("a") == continuation(PROMPT, 8)
    assert pair.decode.end("a") is FinishReason.LENGTH
    assert pair.prefill.ids("a") == []
    assert pair.prefill.end("a") is FinishReason.HANDED_OFF
    assert pair.decode.engine.stats().prefill_tokens == 0
    assert pair.prefill.engine.stats().prefill_tokens == 45
    assert pair.prefill.pages() == (53, 11, 0, 0, 0)  # both keep the prefix
    assert pair.decode.pages() == (51, 13, 0, 0, 0)  # 45 + 7 of the 8 tokens
    report = pair.decode.deltas[("a", 0)][0].hand_off
    assert isinstance(report, HandOffReport)
    assert (report.transferred, report.num_pages, report.num_bytes) == (True, 12, 1200)
    assert all(delta.hand_off is None for delta in pair.decode.deltas[("a", 0)][1:])
