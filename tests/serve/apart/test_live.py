"""Prefill and decode apart, watched: what only this mode has shows on boards, page and in the counters (issue 5)."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import open_chromium
from tests.serve import watched as held
from tests.serve.running import HTTP, Running
from tests.serve.watched import Watched, watched

pytestmark = [
    pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(400),
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(app: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(app, tmp_path_factory.mktemp("prometheus"), num_processes=4) as running:  # 2, router, observatory
        yield running


def test_every_query_of_boards_and_rules_returns_data(fleet: Watched) -> None:
    assert fleet.missing == []
    held.check_recordings(fleet)
    assert fleet.prometheus.fired() == []


def test_each_process_tells_what_the_catalogue_has_for_it_and_nothing_else(fleet: Watched) -> None:
    held.check_emission(fleet, disaggregated=True)


def test_counters_are_what_clients_counted_and_both_ends_of_kv_transfers_agree(fleet: Watched) -> None:
    held.check_truth(fleet)
    held.check_pools(fleet, 2)
    moved = "sum(manta_transfer_bytes_total{direction='%s'})"
    fleet.settled(f"{moved % 'send'} - {moved % 'receive'}", 0)
    assert (fleet.prometheus.value(moved % "receive") or 0) > 0
    assert (fleet.prometheus.value("sum(manta_router_kv_transfers_total{outcome='ok'})") or 0) >= 1
    fleet.settled("sum(manta_transfer_digest_mismatches_total)", 0)


def test_the_page_draws_the_transfer_between_the_two_and_explains_a_kv_transfer(
    fleet: Watched, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = open_chromium(tmp_path_factory.mktemp("chromium"))
    try:
        page.open(f"{fleet.app.url}/manta/")
        assert page.text(".group h3").split() == ["Prefill", "1", "Decode", "1"]
        fleet.traffic.round()
        page.until(lambda: page.all(".rate-bar"), "the rate between prefill and decode")
        name = handed_over(fleet)
        page.one(f'.request-name[data-rid$="{name}"]').click()
        page.says("#why .sentence", "Prompt computed on ")
        page.says("#why", " were handed over in ")
        page.picture("live_disaggregated")
        assert page.complaints() == []
    finally:
        page.close()


def handed_over(fleet: Watched) -> str:
    """Name of the newest request whose K/V came from the prefill replica."""
    for each in reversed(fleet.traffic.answered):
        route = HTTP.get(f"{fleet.app.url}/route/{each.name}", timeout=30).json()
        kv_transfer = route["tries"][-1]["kv_transfer"]
        if each.whole and kv_transfer is not None and kv_transfer["transferred"]:
            return each.name
    raise AssertionError("no request was handed over")
