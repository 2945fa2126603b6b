"""What metrics may cost, with room for a busy machine; `python -m benchmarks overhead metrics` measures."""

from benchmarks.overhead import metrics_watch, request_us, scrape_ms, token_us


def test_a_token_costs_microseconds_and_a_scrape_milliseconds() -> None:
    """Measured 0.35 us, 30 us and 4 ms; a router makes thousands of tokens a second."""
    emitter, watch = metrics_watch()
    assert token_us(watch) < 5.0
    assert request_us(watch) < 500.0
    assert scrape_ms(emitter) < 100.0
