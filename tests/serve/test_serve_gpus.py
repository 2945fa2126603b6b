"""Replicas of two ranks on a Ray with GPUs that are not there: which GPU each rank gets, and what a dead one costs.

Ray counts GPUs, and sets CUDA_VISIBLE_DEVICES, as it is told to; each process that has one computes on the fake device
of tests/gpu/fake_cuda.py, and ranks speak through the host (fake_gpus/sitecustomize.py).
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.places import ROOT
from tests.numerics import tiny
from tests.serve.running import HTTP, Running, serving
from tests.unit.tokenizer_folders import byte_level_folder

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(400)]
NUM_GPUS, TP = 4, 2
PROMPT = list(range(3, 43))  # ids that the tiny model knows


class Fleet:
    """The application, and what its ranks have said of themselves."""

    def __init__(self, app: Running, told: Path) -> None:
        self.app, self._told = app, told

    def ranks(self) -> list[dict[str, Any]]:
        """Those that live, by placement group and rank."""
        said = [json.loads(line) for line in self._told.read_text().splitlines()]
        living = self.app.processes()
        return sorted((each for each in said if each["pid"] in living), key=lambda each: (each["group"], each["rank"]))

    def replica_ids(self) -> list[str]:
        return sorted(each["replica"]["replica_id"] for each in self.app.states())

    def answers(self) -> list[str]:
        """The text of each replica, for the same prompt."""
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        found = []
        for replica in self.replica_ids():
            url, headers = f"{self.app.url}/v1/completions", {"x-manta-replicas": replica}
            answer = HTTP.post(url, json=body, headers=headers, timeout=120)
            assert answer.status_code == 200, answer.text
            found.append(str(answer.json()["choices"][0]["text"]))
        return found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    byte_level_folder(tmp_path)
    tiny.save("llama", tmp_path, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    told = tmp_path / "told"
    told.touch()
    environment = {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": NUM_GPUS}),
        "MANTA_TEST_FAKE_GPUS": str(told),
        "PYTHONPATH": f"{ROOT / 'tests/serve/fake_gpus'}{os.pathsep}{ROOT}",
    }
    with serving(
        tmp_path,
        environment=environment,
        model={"path": str(tmp_path), "dtype": "float32"},
        replicas={"count": "auto", "cpus": 0.2, "gpus": 1, "health_period_s": 1},
        parallel={"tp": TP},
        cache={"max_total_tokens": 1024},
        scheduler={"chunked_prefill_size": 32, "max_running_requests": 2},
        attention="torch_native",
        cuda_graphs=False,
    ) as app:
        app.until(lambda: app.serves_with(NUM_GPUS // TP), 120)
        yield Fleet(app, told)


def test_each_rank_has_a_gpu_of_its_own_and_a_replica_that_lost_one_is_replaced(fleet: Fleet) -> None:
    """Replicas fill the GPUs; rank r computes in bundle r of its placement group; the answer is the same before and
    after a follower is killed."""
    before, first = fleet.replica_ids(), fleet.ranks()
    check(first)
    [text] = set(fleet.answers())
    dead = first[1]
    os.kill(dead["pid"], signal.SIGKILL)
    fleet.app.until(lambda: len(fleet.ranks()) == NUM_GPUS and dead["pid"] not in pids(fleet.ranks()), 120)
    # a router may still name the one that died while the ranks of the next one load
    fleet.app.until(lambda: len(set(before) & set(fleet.replica_ids())) == 1, 120)
    fleet.app.until(lambda: fleet.app.serves_with(NUM_GPUS // TP), 120)
    now = fleet.ranks()
    check(now)
    assert len(pids(first) & pids(now)) == TP, "both ranks of the replica are new, and none of the other"
    assert set(fleet.answers()) == {text}


def pids(ranks: list[dict[str, Any]]) -> set[int]:
    return {each["pid"] for each in ranks}


def check(ranks: list[dict[str, Any]]) -> None:
    assert [each["rank"] for each in ranks] == [0, 1] * (NUM_GPUS // TP)
    assert len({each["group"] for each in ranks}) == NUM_GPUS // TP
    assert sorted(each["gpus"] for each in ranks) == [str(gpu) for gpu in range(NUM_GPUS)]
    for each in ranks:
        bundles = [int(found[1]) for name in each["resources"] if (found := re.match(r"GPU_group_(\d+)_", name))]
        assert bundles == [each["rank"]]
