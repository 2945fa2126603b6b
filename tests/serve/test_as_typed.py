"""Manta as people start it: by Ray's own commands, line for line as README has them, and from a folder with a difficult
name.

The lines run on a machine of their own, made of namespaces (tests/cluster/machines.py): its ports are free, its user
has no Ray yet, and what they leave behind ends with it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deployments.places import ROOT
from tests.cluster.machines import Machine, Network, require_machines
from tests.serve.running import HTTP, MARK, Running, processes_of, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
README = (ROOT / "README.md").read_text()
WITHIN_S = 300.0
ACTIVATE = ". .venv/bin/activate"


def test_it_serves_from_a_folder_whose_name_bash_would_split(tmp_path: Path) -> None:
    place = tmp_path / "J\u00f6rg's \"$HOME\" projects"
    place.symlink_to(sys.prefix)
    with serving(tmp_path, replicas={"count": 1}, python=str(place / "bin" / "python")) as running:
        assert running.serves_with(1)
        answer = HTTP.post(f"{running.url}/v1/completions", json={"prompt": "Water is", "max_tokens": 4}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4


class Typist:
    """Types lines into a shell of a machine, in the project's folder."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.mark = machine, machine.name + os.urandom(6).hex()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MANTA_"))}
        # Serve kills a proxy that is not ready after 5 s, and `serve deploy` fails then: not for a machine that is busy
        ready = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
        self._environment = {**kept, **ready, "HOME": "/tmp/home", "OMP_NUM_THREADS": "1", MARK: self.mark}
        self.log = machine.tmp / "typed.log"

    def start(self, *lines: str) -> subprocess.Popen[bytes]:
        """Type ``lines`` and wait for nothing."""
        script = "\n".join(["mkdir -p $HOME", "set -e", ACTIVATE, *lines])
        return self.machine.start(["bash", "-c", script], environment=self._environment, log=self.log)

    def does(self, *lines: str) -> bool:
        """Whether all of ``lines`` end well, one after the other."""
        return self.start(*lines).wait(WITHIN_S) == 0

    @property
    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    require_machines()
    network = Network(tmp_path)
    try:
        yield Typist(network.add("head"))
    finally:
        network.off()


def typed(start: str) -> list[str]:
    """The lines of README from the one that begins with ``start`` to the end of its block."""
    block = README[README.index(f"\n{start}") + 1 :].partition("\n```")[0]
    return re.sub(r" +# .*", "", block).splitlines()


CURL = "\n".join(typed("curl "))
SERVES = f"test $({CURL} -s -o /dev/null -w '%{{http_code}}') = 200"


def test_serve_run_serves_the_file_of_the_readme_until_ctrl_c(typist: Typist) -> None:
    [line] = typed("serve run ")
    assert line == "serve run serve_config.yaml"
    running = typist.start(line)
    Running.until(lambda: typist.does(SERVES) or running.poll() is not None, WITHIN_S, 2.0)
    assert running.poll() is None, typist.said
    [pid] = [pid for pid, command in processes_of(typist.mark).items() if f"serve run {line.split()[-1]}" in command
             and "python" in command]  # fmt: skip
    os.kill(pid, signal.SIGINT)
    assert running.wait(WITHIN_S) == 0, typist.said
    Running.until(lambda: processes_of(typist.mark) == {}, 30)


def test_serve_deploy_on_a_plain_ray_start_serves(typist: Typist) -> None:
    export, start, deploy = typed("export RAY_AUTH_MODE")
    assert export.startswith("export RAY_AUTH_MODE=token; ")
    assert (start, deploy) == ("ray start --head", "serve deploy serve_config.yaml && serve status")
    assert typist.does(export, start), typist.said
    assert not typist.does(deploy)  # as without the line of README
    assert "RAY_AUTH_MODE" in typist.said  # Ray says why, and docs/operate.md what to do
    address = f"export RAY_ADDRESS={typist.machine.address}:6379"
    assert typist.does(address, "manta check serve_config.yaml"), typist.said
    assert "if it asks for a token, set RAY_AUTH_MODE=token" in typist.said
    assert typist.does(export, deploy), typist.said
    Running.until(lambda: typist.does(SERVES), WITHIN_S, 2.0)


def test_it_autoscales_on_a_plain_ray_start(typist: Typist) -> None:
    """A second replica starts while prompts wait, and no request fails."""
    export, start, deploy = typed("export RAY_AUTH_MODE")
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    scaling = {"min_replicas": 1, "max_replicas": 2, "ttft_objective_s": 0.3, "upscale_delay_s": 0.5}
    config["applications"][0]["args"]["replicas"] = {"autoscaling": scaling}
    (typist.machine.tmp / "scaling.yaml").write_text(yaml.safe_dump(config))
    for number in range(24):
        body = {"prompt": f"{number}: a tale never told before. " * 100, "max_tokens": 4}
        (typist.machine.tmp / f"{number}.json").write_text(json.dumps(body))
    assert typist.does(export, start), typist.said
    assert typist.does(export, deploy.replace("serve_config.yaml", "/tmp/scaling.yaml")), typist.said
    Running.until(lambda: typist.does(SERVES), WITHIN_S, 2.0)
    curl = "curl -sf -o /dev/null http://127.0.0.1:8000/v1/completions -d @/tmp/{}.json"
    load = typist.start(f"seq 0 23 | xargs -P 24 -I{{}} {curl}")
    two = "curl -s http://127.0.0.1:8000/health | grep '\"replicas_ready\":2'"
    Running.until(lambda: typist.does(two), WITHIN_S, 2.0)
    assert load.wait(WITHIN_S) == 0, typist.said
