import logging

import pytest

from replicas.errors import InvalidConfig
from replicas.memory import sizing

GIB = 2**30


def test_kv_gets_what_weights_and_reserve_leave() -> None:
    """SPEC A05: 10 GiB free, weights take 4, a tenth is the reserve: 6 - 1 = 5."""
    assert sizing.kv_bytes(10 * GIB, 6 * GIB, 0.9) == pytest.approx(5 * GIB, abs=8)
    assert sizing.kv_bytes_by_reserve(10 * GIB, 6 * GIB, 0.1) == pytest.approx(5 * GIB, abs=8)  # SPEC A09


def test_no_room_for_kv_names_the_setting_and_the_value_that_would_do() -> None:
    with pytest.raises(InvalidConfig, match=r"weights took 8,192 MiB.*increase mem_fraction_static above 0.80"):
        sizing.kv_bytes(10 * GIB, 2 * GIB, 0.75)


def test_tokens_are_bytes_over_cell_floored_to_pages() -> None:
    """SPEC A06: 1,050 bytes at 10 a token are 105 tokens, 6 whole pages of 16."""
    assert sizing.pool_tokens(1050, 10, 16, None) == 96
    size = sizing.pool_size(1050, 10, 16, None)
    assert (size.num_pages, size.num_tokens, size.bytes) == (6, 96, 960)


def test_the_cap_is_used_when_it_is_lower_and_warned_about_when_it_is_higher(caplog: pytest.LogCaptureFixture) -> None:
    """SPEC A07, K1: the snippet of the text applied the cap when it was None."""
    with caplog.at_level(logging.WARNING):
        assert sizing.pool_tokens(1050, 10, 16, 50) == 48
        assert caplog.records == []
        assert sizing.pool_tokens(1050, 10, 16, 5000) == 96
    assert "max_total_tokens = 5000 is more than fits; using 105 tokens" in caplog.text


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"less than a page of 16 tokens.*is 15 tokens, no cap"):
        sizing.pool_tokens(159, 10, 16, None)
    with pytest.raises(InvalidConfig, match="max_total_tokens = 8"):
        sizing.pool_tokens(1050, 10, 16, 8)


@pytest.mark.parametrize(
    ("tokens", "given", "rows"),
    [(8_192, None, 2048), (48 * 1024, None, 3072), (1_000_000, None, 4096), (1_000_000, 7, 7)],
)
def test_request_rows_follow_the_pool_within_bounds_unless_given(tokens: int, given: int | None, rows: int) -> None:
    """SPEC A08 at a context of 8,192: 48k tokens are 6 contexts of 512 rows."""
    assert sizing.max_running_requests(tokens, 8192, given) == rows


def test_the_pool_describes_itself_in_one_line() -> None:
    size = sizing.PoolSize(num_pages=2048, page_size=16, cell_bytes=4096)
    assert size.describe() == "32,768 tokens, 2,048 pages, 128 MiB"
