"""Replicas on a Ray with GPUs that are not there: which GPU each rank gets, what a dead one costs, and what another
size and a hand-over are there.

Ray counts GPUs, and sets CUDA_VISIBLE_DEVICES, as it is told to; each process that has one computes on the fake device
of tests/gpu/fake_cuda.py, and ranks speak through the host (fake_gpus/sitecustomize.py). Where eight are wanted, no
process loads a model.
"""

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.app import num_replicas, replica_options
from deployments.places import ROOT
from deployments.settings.capacity import shortages, too_wide
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import parse
from deployments.watch.observatory.serve_details import capacity_of_cluster
from tests.numerics import tiny
from tests.serve.fake_gpus.places import ToldReplica
from tests.serve.running import HTTP, Running, serving
from tests.unit.tokenizer_folders import byte_level_folder

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(400)]
NUM_GPUS, TP = 4, 2
REPLICAS = {"cpus": 0.2, "gpus": 1, "health_period_s": 1}
PROMPT = list(range(3, 43))  # ids that the tiny model knows


class Fleet:
    """The application, and what its ranks have said of themselves."""

    def __init__(self, app: Running, told: Path) -> None:
        self.app, self._told = app, told

    def ranks(self) -> list[dict[str, Any]]:
        """Those that live, by placement group and rank."""
        said = [json.loads(line) for line in self._told.read_text().splitlines()]
        living = self.app.processes()
        now = [each for each in said if each["pid"] in living]
        return sorted(now, key=lambda each: (str(each["group"]), each["rank"]))

    def replica_ids(self) -> list[str]:
        return sorted(each["replica"]["replica_id"] for each in self.app.states())

    def answers(self, *replicas: str) -> list[str]:
        """The text of each of ``replicas``, by default of all, for the same prompt."""
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        found = []
        for replica in replicas or self.replica_ids():
            url, headers = f"{self.app.url}/v1/completions", {"x-manta-replicas": replica}
            answer = HTTP.post(url, json=body, headers=headers, timeout=120)
            assert answer.status_code == 200, answer.text
            found.append(str(answer.json()["choices"][0]["text"]))
        return found


@contextlib.contextmanager
def fleet(folder: Path, **settings: Any) -> Iterator[Fleet]:
    """A tiny model on NUM_GPUS GPUs, with other ``settings``, by group."""
    byte_level_folder(folder)
    tiny.save("llama", folder, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    told = folder / "told"
    told.touch()
    environment = {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": NUM_GPUS}),
        "MANTA_TEST_FAKE_GPUS": str(told),
        "PYTHONPATH": f"{ROOT / 'tests/serve/fake_gpus'}{os.pathsep}{ROOT}",
    }
    with serving(
        folder,
        environment=environment,
        model={"path": str(folder), "dtype": "float32"},
        replicas=REPLICAS,
        cache={"max_total_tokens": 1024},
        scheduler={"chunked_prefill_size": 32, "max_running_requests": 2},
        attention="torch_native",
        cuda_graphs=False,
        **settings,
    ) as app:
        app.until(lambda: app.serves_with(NUM_GPUS // TP), 120)
        yield Fleet(app, told)


def test_a_replica_that_lost_a_rank_is_replaced_and_another_size_follows_the_load(tmp_path: Path) -> None:
    """Replicas fill the GPUs; rank r computes in bundle r of its placement group; the answer is the same before and
    after a follower is killed. Then replicas of one rank take the place of those of two: two, and four under load."""
    with fleet(tmp_path, parallel={"tp": TP}) as gpus:
        before, first = gpus.replica_ids(), gpus.ranks()
        check(first, tp=TP)
        [text] = set(gpus.answers())
        dead = first[1]
        os.kill(dead["pid"], signal.SIGKILL)
        gpus.app.until(lambda: len(gpus.ranks()) == NUM_GPUS and dead["pid"] not in pids(gpus.ranks()), 120)
        # a router may still name the one that died while the ranks of the next one load
        gpus.app.until(lambda: len(set(before) & set(gpus.replica_ids())) == 1, 120)
        gpus.app.until(lambda: gpus.app.serves_with(NUM_GPUS // TP), 120)
        now = gpus.ranks()
        check(now, tp=TP)
        assert len(pids(first) & pids(now)) == TP, "both ranks of the replica are new, and none of the other"
        assert set(gpus.answers()) == {text}
        scaled = {"min_replicas": 2, "max_replicas": NUM_GPUS, "upscale_delay_s": 0.5, "metrics_interval_s": 0.5,
                  "look_back_period_s": 2}  # fmt: skip
        said = gpus.app.deploy(parallel={"tp": 1}, replicas={**REPLICAS, "autoscaling": scaled}, allow_outage=True)
        assert said == "RUNNING"
        gpus.app.until(lambda: not pids(gpus.ranks()) & pids(now) and gpus.app.serves_with(2), 120)
        assert len({each["gpus"] for each in gpus.ranks()}) == 2
        under_load(gpus.app, lambda: gpus.app.serves_with(NUM_GPUS))
        assert sorted(each["gpus"] for each in gpus.ranks()) == [str(gpu) for gpu in range(NUM_GPUS)]
        assert set(gpus.answers()) == {text}


def under_load(app: Running, until: Callable[[], bool]) -> None:
    """Have more requests than two replicas run, until there are four."""
    body, stop, statuses = {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True}, threading.Event(), list[int]()

    def client() -> None:
        while not stop.is_set():
            statuses.append(HTTP.post(f"{app.url}/v1/completions", json=body, timeout=120).status_code)

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(client) for _ in range(12)]
        try:
            app.until(until, 120)
        finally:
            stop.set()
        for each in clients:
            each.result()
    assert set(statuses) == {200}


def test_prefill_hands_over_to_decode_from_gpus_to_gpus(tmp_path: Path) -> None:
    """Two ranks each; decode answers the same alone."""
    apart = {"prefill": {"tp": TP}, "decode": {"tp": TP}, "transfer": {"disaggregation": "always"}}
    with fleet(tmp_path, base="docs/examples/disaggregated.yaml", **apart) as gpus:
        check(gpus.ranks(), tp=TP)
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = HTTP.post(f"{gpus.app.url}/v1/completions", json=body, timeout=120)
        assert "kv_transfer=ok" in answer.headers["x-manta-route"]
        [decode] = [state["replica"] for state in gpus.app.states() if state["replica"]["role"] == "decode"]
        assert gpus.answers(decode["replica_id"]) == [answer.json()["choices"][0]["text"]]


def pids(ranks: list[dict[str, Any]]) -> set[int]:
    return {each["pid"] for each in ranks}


def check(ranks: list[dict[str, Any]], *, num_gpus: int = NUM_GPUS, tp: int) -> None:
    """All GPUs have a rank each; rank r lies in bundle r of its replica's group."""
    assert [each["rank"] for each in ranks] == [*range(tp)] * (num_gpus // tp)
    assert len({each["group"] for each in ranks}) == num_gpus // tp
    assert sorted(each["gpus"] for each in ranks) == [str(gpu) for gpu in range(num_gpus)]
    for each in ranks:
        bundles = [int(found[1]) for name in each["resources"] if (found := re.match(r"GPU_group_(\d+)_", name))]
        assert bundles == [each["rank"]]


def test_eight_gpus_are_filled_by_prefill_and_decode_of_four_ranks_as_by_two_replicas_of_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Serve places them; no process loads a model."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of Ray's processes
    ray.init(num_cpus=9, num_gpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        given = {"model": {"path": "m"}, "replicas": {"gpus": 1, "cpus": 1}}
        assert [num_replicas(parse({**given, "parallel": {"tp": tp}})) for tp in (1, 2, 4)] == [8, 4, 2]
        unified = replica_options(parse({**given, "parallel": {"tp": 4}}))
        apart = parse({**given, "mode": "disaggregated", "prefill": {"tp": 4}, "decode": {"tp": 4}})
        assert too_wide([apart], capacity_of_cluster()) == shortages([apart], capacity_of_cluster()) == []
        replicas, found = [], []
        for own in [config_of(apart, role) for role in roles_of(apart)]:
            options = replica_options(own)
            assert options["num_replicas"] == 1
            assert all(options[name] == unified[name] for name in options if name.startswith("placement_group"))
            group = placement_group(options["placement_group_bundles"], strategy=options["placement_group_strategy"])
            place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
            replica = ray.remote(ToldReplica).options(scheduling_strategy=place, **options["ray_actor_options"])
            replicas.append(replica.remote())
            found.append(replicas[-1].ranks.remote(own))
        check([rank for ranks in ray.get(found, timeout=300) for rank in ranks], num_gpus=8, tp=4)
        assert ray.available_resources().get("GPU", 0) == 0
    finally:
        ray.shutdown()
