"""Fan-in, numbers, polling and settings of the observatory, each by itself."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dashboards.catalog import METRICS, Process
from deployments.command.check import read
from deployments.fleet.seen import Target
from deployments.places import ROOT
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.observatory import fan_in
from deployments.watch.observatory.app import Emission
from deployments.watch.observatory.fan_in import merge
from deployments.watch.observatory.figures import bucket_quantile, quantile, short
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import ServeDetails
from deployments.watch.observatory.settings import key_moved, parse, with_key
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.watch import NoRouter, Watch
from replicas.cache.tree_view import CacheTree
from replicas.errors import InvalidConfig
from tests.harness import Clock
from tests.unit.deployments.observed import details, listed, seen, view
from tests.unit.deployments.test_observatory_http import ListedRouters

ONE = """# HELP manta_a_total A.
# TYPE manta_a_total counter
manta_a_total{replica="one",path="x y"} 1.0
# HELP manta_h H.
# TYPE manta_h histogram
manta_h_bucket{replica="one",le="+Inf"} 2.0
manta_h_count{replica="one"} 2.0
"""
TWO = ONE.replace('"one"', '"two"').replace(" 2.0", " 5.0")


def test_families_keep_together_and_are_described_once() -> None:
    assert merge([ONE, TWO]) == """# HELP manta_a_total A.
# TYPE manta_a_total counter
manta_a_total{replica="one",path="x y"} 1.0
manta_a_total{replica="two",path="x y"} 1.0
# HELP manta_h H.
# TYPE manta_h histogram
manta_h_bucket{replica="one",le="+Inf"} 2.0
manta_h_count{replica="one"} 2.0
manta_h_bucket{replica="two",le="+Inf"} 5.0
manta_h_count{replica="two"} 5.0
"""


def test_a_series_comes_once_and_one_without_a_type_is_a_family_of_its_own() -> None:
    assert merge([ONE, ONE]) == ONE
    assert merge(["b 1\na 2\n", "b 3\nb{x=\"1\"} 4\n"]) == 'b 1\nb{x="1"} 4\na 2\n'
    assert merge([]) == ""


async def test_a_process_that_hangs_costs_its_own_series_alone() -> None:
    async def fetch(address: str) -> str:
        if address == "hangs:1":
            await asyncio.Event().wait()
        return ONE

    targets = [Target(address=f"{name}:1", role="unified", process_id=name, node_id="n") for name in ("one", "hangs")]
    text = await fan_in.gather(targets, fetch, within_s=0.01)
    assert text == ONE + "# unified hangs at hangs:1 did not answer: TimeoutError\n"


def test_numbers_are_short() -> None:
    assert [short(value) for value in (0.0, 123456.0, 0.0123456, -1.005, float("inf"), float("nan"))] == [
        0.0, 123000.0, 0.0123, -1.0, 0.0, 0.0,
    ]  # fmt: skip
    assert (quantile([], 0.5), quantile([1.0, 2.0, 3.0], 0.5), quantile([1.0, 2.0, 3.0], 0.9)) == (None, 2.0, 3.0)
    # 10 gaps of at most 10 ms, 10 between 10 and 20 ms, none above
    bounds, counts = (0.01, 0.02), (10, 10, 0)
    shares = [bucket_quantile(bounds, counts, share) for share in (0.25, 0.5, 0.75)]
    assert shares == pytest.approx([0.005, 0.01, 0.015])
    assert (bucket_quantile(bounds, (0, 0, 1), 0.5), bucket_quantile(bounds, (0, 0, 0), 0.5)) == (0.02, None)


class Failing(ListedRouters):
    """Its second answer is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.sinces: list[dict[str, int]] = []

    async def observe(self, since: Mapping[str, int]) -> list[RouterView]:
        self.sinces.append(dict(since))
        if len(self.sinces) == 2:
            raise RuntimeError("unforeseen")
        return [view("one", seen("a"), seq=len(self.sinces))]


async def test_a_poll_that_fails_is_followed_by_one_that_does_not() -> None:
    state = State(first_version=0)
    routers, models = Failing(), list[str]()
    watch = Watch(
        routers=routers, look=lambda: details(listed("a"), unified=1), state=state,
        on_view=lambda newest: models.append(newest.model), clock=lambda: 5.0, calendar=lambda: 1005.0,
    )  # fmt: skip
    await watch.look()
    for _ in range(3):
        await watch.poll()
    assert routers.sinces == [{}, {"one": 1}, {"one": 1}]
    assert (state.version, state.since()["time"]) == (2, 1005.0)
    assert models == ["tiny", "tiny"]
    assert state.since()["autoscaling"]["targets"][0]["running"] == 1


async def test_when_serve_does_not_answer_its_last_word_stands() -> None:
    state = State(first_version=0)
    answers: list[ServeDetails] = [details(listed("b", state="STARTING"))]
    watch = Watch(routers=ListedRouters(), look=answers.pop, state=state)
    for _ in range(2):
        await watch.look()
        await watch.poll()
        assert state.replica_ids == ["b"]


def test_its_own_metrics_are_those_of_the_catalogue_all_of_them() -> None:
    emitter = Emitter(Process.OBSERVATORY, Identity(model="tiny", role="observatory", replica="own"))
    state = State()
    emission = Emission(emitter, targets=lambda: state.scaling.targets, num_viewers=lambda: 3)
    state.advance([view("one", seen("a", num_running=1))], details(listed("a"), unified=2), 1.0)
    emission.polled(0.02)
    emission.scaled("unified", "up")

    def value(name: str, **labels: str) -> float | None:
        own = {"model": "tiny", "role": "observatory", "replica": "own", **labels}
        return emitter.registry.get_sample_value(f"manta_{name}", own)

    assert {metric.name for metric in emitter.metrics} - emitter.bound == {
        metric.name for metric in METRICS if metric.process is Process.EVERY  # emitter_of binds them
    }
    assert value("observatory_viewers") == 3
    assert value("observatory_poll_duration_seconds_count") == 1
    assert value("autoscaler_replicas", target_role="unified", kind="desired") == 2
    assert value("autoscaler_pressure_ratio", target_role="unified", signal="slots") == 0.28  # 1 of 4 x 0.9
    assert value("autoscaler_decisions_total", target_role="unified", direction="up") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"aplication": "manta"}, r"aplication: is unknown \(did you mean 'application'\?\)$"),
        ({"admin_key": "short"}, "admin_key: must have at least 8 characters, here or in MANTA_ADMIN_KEY"),
        ({"application": ""}, "application: must not be empty"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as refused:
        parse(args)
    assert "short'" not in str(refused.value)


def test_the_key_comes_from_the_file_or_else_from_the_environment_and_is_not_shown() -> None:
    environment = {"MANTA_ADMIN_KEY": "of the environment"}
    assert parse(with_key({}, environment)).key == "of the environment"
    assert parse(with_key({"admin_key": "of the file"}, environment)).key == "of the file"
    assert parse(with_key({}, {})).key is None
    assert key_moved({"application": "a", "admin_key": "of the file"}, environment) == {"application": "a"}
    assert key_moved({}, environment) == {}
    assert parse(with_key({}, environment)).key == "of the file"
    assert "of the file" not in repr(parse({"admin_key": "of the file"}))


@pytest.mark.model
@pytest.mark.parametrize("file", ["serve_config.yaml", "docs/examples/disaggregated.yaml", "docs/examples/tiers.yaml"])
def test_the_projects_files_hold_it_and_it_must_watch_an_application_of_the_file(file: str, tmp_path: Path) -> None:
    schema, configs = read(str(ROOT / file))
    assert (schema.applications[1].import_path, schema.applications[1].route_prefix) == (
        "deployments.watch.observatory.app:build",
        "/manta",
    )
    assert list(configs) == ["manta"]
    other = tmp_path / "other.yaml"
    other.write_text((ROOT / file).read_text().replace("application: manta", "application: another"))
    with pytest.raises(InvalidConfig, match="application: 'another' is not in this file; known: manta"):
        read(str(other))


class SlowTrees(ListedRouters):
    """Answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        await self.go.wait()
        return await super().cache_tree(replica_id, max_depth=max_depth, min_tokens=min_tokens)


async def test_who_looks_within_a_second_shares_one_tree_and_other_depths_have_their_own() -> None:
    """One that leaves takes it from nobody, and a failure is told to those who waited, and not kept."""
    routers, clock = SlowTrees(), Clock()
    trees = Trees(routers, clock=clock, calendar=lambda: 1000.0 + clock.now_s)
    looks = [asyncio.create_task(trees.get("a", max_depth=depth, min_tokens=0)) for depth in (6, 6, 6, 3)]
    await asyncio.sleep(0)
    looks.pop(0).cancel()
    await asyncio.sleep(0)
    routers.go.set()
    bodies = await asyncio.gather(*looks)
    assert sorted(routers.asked) == [("a", 3, 0), ("a", 6, 0)]
    clock.now_s += 0.9
    assert await trees.get("a", max_depth=6, min_tokens=0) is bodies[0]
    clock.now_s += 0.2
    routers.error = NoRouter("no router answered")
    for _ in range(2):
        with pytest.raises(NoRouter):
            await trees.get("a", max_depth=6, min_tokens=0)
    routers.error = None
    assert json.loads(await trees.get("a", max_depth=6, min_tokens=0))["time"] == pytest.approx(1000 + clock.now_s)
    assert len(routers.asked) == 5
