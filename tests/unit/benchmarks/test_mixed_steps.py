"""The measurement of prompts beside answers being written, over a fake device."""

import pytest

from benchmarks.mixed_steps import Load, measure, parse_way, rows_of
from tests.harness import fake_engine


def test_a_way_names_the_tokens_of_a_step_beside_others() -> None:
    assert parse_way("first512") == (False, 512)
    assert parse_way("mixed256") == (True, 512)  # the setting is halved while others run
    with pytest.raises(ValueError, match="'mix' is no way: write first or mixed and a number"):
        parse_way("mix")


def test_every_prompt_has_a_first_token_every_chat_gaps_and_nothing_stays_behind() -> None:
    engine, _ = fake_engine(num_pages=256)
    load = Load(chats=2, prompts=3, prompt_len=20, rate=1000.0)
    found = measure(engine, load, seed=0)
    assert len(found.ttfts_s) == 3
    assert min(found.ttfts_s) > 0
    assert len(found.gaps_s) >= 2 * 2  # a prompt of 20 takes more than one step of 8, each with a token of both chats
    assert found.chat_tokens_per_s == pytest.approx(len(found.gaps_s) / found.took_s)
    assert not engine.has_work
    assert engine.flush_cache()
    names = [row.name for row in rows_of(load, {"mixed8": [found]})]
    assert names[:2] == ["mixed8: ITL p50", "mixed8: ITL p99"]
