"""A running Manta that a real Prometheus scrapes, and what both modes are held to alike (two_replicas, apart)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from dashboards.catalog import METRICS, PREFIX, Metric, Process
from dashboards.check import check_live
from dashboards.files import rules_text
from tests.scraped import Scraped
from tests.serve.prometheus import Prometheus, complaints, prometheus
from tests.serve.running import HTTP, Running
from tests.serve.traffic import NAME, Traffic

UP_S = 15.0  # all targets, from the start of Prometheus
SETTLED_S = 15.0  # until a scrape has seen what happened last
RATES_S = 90.0  # until every query has data: some three scrapes under load
# judged by the alerts, and not what these tests are about: how quick this machine is
PATIENT = {"ttft_objective_s": 60, "itl_objective_s": 10}


@dataclass(kw_only=True)
class Watched:
    """Both, and the traffic so far."""

    app: Running
    prometheus: Prometheus
    traffic: Traffic
    up_s: float  # from the start of Prometheus until all targets were up
    missing: list[str] = field(default_factory=list)  # queries without data, under load

    def get(self, path: str, **parameters: str) -> Any:
        """An answer of the observatory."""
        return HTTP.get(f"{self.app.url}/manta{path}", params=parameters, timeout=30).raise_for_status()

    def state(self) -> dict[str, Any]:
        return dict(self.get("/api/state").json())

    def accepting(self) -> set[str]:
        return {each["id"] for each in self.state()["replicas"] if each["state"] == "accepting"}

    def told(self) -> dict[str, str]:
        """What each process says to a scrape, by its address."""
        addresses = [address for group in self.get("/sd").json() for address in group["targets"]]
        return {address: HTTP.get(f"http://{address}/metrics", timeout=10).text for address in addresses}

    def settled(self, query: str, wanted: float) -> None:
        """Waits until the next scrapes agree with ``wanted``."""
        try:
            self.app.until(lambda: self.prometheus.value(query) == wanted, SETTLED_S)
        except AssertionError as error:
            raise AssertionError(f"{query} is {self.prometheus.value(query)}, wanted {wanted}") from error


@contextmanager
def watched(app: Running, folder: Path, *, num_processes: int) -> Iterator[Watched]:
    """All targets up, and ``app`` under load until boards have something to show; it has served nothing yet."""
    app.until(lambda: len(HTTP.get(f"{app.url}/manta/sd", timeout=30).json()) == num_processes, 30)
    with prometheus(folder, f"{app.url}/manta") as server:
        up_s = app.until(lambda: is_up(server, num_processes), 4 * UP_S)
        found = Watched(app=app, prometheus=server, traffic=Traffic(app.url), up_s=up_s)
        disaggregated = found.state()["mode"] == "disaggregated"

        def shows_all() -> bool:
            found.traffic.round()
            found.missing = check_live(server.url, disaggregated=disaggregated)
            return not found.missing

        try:
            app.until(shows_all, RATES_S)
        except AssertionError:
            print("\n".join(found.missing))  # test_every_query_... fails with them
        yield found


def is_up(server: Prometheus, num_processes: int) -> bool:
    try:
        return list(server.targets().values()) == ["up"] * num_processes
    except httpx.HTTPError:
        return False  # it is starting


def check_emission(watched: Watched, *, disaggregated: bool) -> None:
    """Each process tells all that the catalogue has for it, and nothing else; promtool has no complaint."""
    told = watched.told()
    roles = set()
    for address, text in told.items():
        scraped = Scraped(text)
        [role] = scraped.values("build_info", "role")
        roles.add(role)
        wanted = list(of_process(process_of(role), disaggregated=disaggregated))
        has = {each.name for each in scraped.samples}
        assert {metric.full_name for metric in wanted if not has & set(metric.series_names)} == set(), f"of {role}"
        allowed = {name for metric in wanted for name in metric.series_names}
        assert {name for name in has if name.startswith(PREFIX)} - allowed == set(), f"{role} at {address}"
        assert complaints(text) == "", f"{role} at {address}"
    assert roles == ({"prefill", "decode"} if disaggregated else {"unified"}) | {"router", "observatory"}
    fan_in = watched.get("/metrics").text
    assert complaints(fan_in) == "", "fan-in"
    assert series_of(fan_in) == {each for text in told.values() for each in series_of(text)}
    no_request_is_named([*told.values(), fan_in], watched)


def of_process(process: Process, *, disaggregated: bool) -> Iterable[Metric]:
    """The catalogue's share of one process on a CPU."""
    return (
        metric
        for metric in METRICS
        if metric.process in (process, Process.EVERY)
        and (disaggregated or not metric.disaggregated)
        and not metric.gpu
    )


def process_of(role: str) -> Process:
    return {"router": Process.ROUTER, "observatory": Process.OBSERVATORY}.get(role, Process.REPLICA)


def series_of(text: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return {(each.name, frozenset(each.labels.items())) for each in Scraped(text).samples}


def no_request_is_named(texts: Iterable[str], watched: Watched) -> None:
    last = watched.traffic.last("completions").name
    internal = HTTP.get(f"{watched.app.url}/route/{last}", timeout=30).json()["internal_rid"]
    for text in texts:
        for rid in (NAME, internal.partition(".")[0]):
            assert rid not in text, [line for line in text.splitlines() if rid in line]


def check_truth(watched: Watched) -> None:
    """The counters of routers and replicas are what clients counted."""
    traffic = watched.traffic
    for (endpoint, outcome), count in traffic.ended.items():
        watched.settled(f'sum(manta_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}})', count)
    watched.settled("sum(manta_requests_total)", traffic.num_sent)
    watched.settled("sum(manta_request_prompt_tokens_sum)", traffic.sum_of("prompt", whole=True))
    watched.settled("sum(manta_request_output_tokens_sum)", traffic.sum_of("output", whole=True))
    watched.settled("sum(manta_router_prompt_tokens_total)", traffic.sum_of("prompt", whole=False))
    watched.settled("sum(manta_router_actual_overlap_tokens_total)", traffic.sum_of("cached", whole=False))
    watched.settled("sum(manta_requests_in_flight)", 0)


def check_pools(watched: Watched, num_replicas: int) -> None:
    """In every scrape so far, the states of each replica's pool sum to its capacity."""
    by = "by (replica, tier)"
    difference = f"abs(sum {by} (manta_kv_pool_tokens) - sum {by} (manta_kv_pool_capacity_tokens))"
    found = watched.prometheus.series(f"max_over_time(({difference})[2m:5s])")
    assert [value for _, value in found] == [0.0] * num_replicas


def check_recordings(watched: Watched) -> None:
    """Wait until Prometheus has recorded every recording rule; each has data in both modes."""
    rules = [rule for group in yaml.safe_load(rules_text())["groups"] for rule in group["rules"]]
    missing = {rule["record"] for rule in rules if "record" in rule}

    def recorded() -> bool:
        missing.difference_update({name for name in missing if watched.prometheus.series(name)})
        return not missing

    try:
        watched.app.until(recorded, 40)
    except AssertionError as error:
        raise AssertionError(f"not recorded: {sorted(missing)}") from error


def address_of(watched: Watched, replica_id: str) -> str:
    """Where a process serves its metrics."""
    labels, _ = watched.prometheus.series(f'manta_build_info{{replica="{replica_id}"}}')[0]
    return labels["instance"]
