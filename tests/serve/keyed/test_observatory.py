"""The observatory on a real local Ray shows what runs, to those who have the key.

Its death, and that of a replica, are watched in tests/serve/two_replicas/test_as_watched.py.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.command import haproxy
from tests.serve.keyed.conftest import API_KEY, KEY, SHOWN
from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]


def test_it_says_what_is_served_where_with_a_line_to_try(app: Running) -> None:
    log = app.log.read_text()
    assert "\n  KV pool   8,000 tokens, 500 pages, 352 MiB, each of 2\n" in log
    assert "\n  computes  on the CPU in float32, attention: " in log
    assert f"\n  API       {app.url}/v1\n" in log
    assert f"ready: SmolLM2-135M-Instruct on 2 replicas at {app.url}/v1" in log
    line = next(line for line in log.splitlines() if line.startswith("curl "))
    assert f"{app.url}/v1/chat/completions" in line


def test_what_nothing_asks_is_not_started(app: Running) -> None:
    """Ray's API server, for which its start would wait, and its monitors."""
    unasked = re.compile(r"/ray/(dashboard/dashboard|autoscaler/\S*monitor|_private/log_monitor)\.py ")
    assert [command for command in app.processes().values() if unasked.search(command)] == []


def get(app: Running, path: str, **options: Any) -> httpx.Response:
    return HTTP.get(f"{app.url}/manta{path}", timeout=30, headers=SHOWN, **options)


def state(app: Running) -> dict[str, Any]:
    return dict(get(app, "/api/state").json())


def accepting(app: Running) -> list[str]:
    return [each["id"] for each in state(app)["replicas"] if each["state"] == "accepting"]


def test_the_state_shows_router_replicas_and_how_many_are_wanted(app: Running) -> None:
    app.until(lambda: len(accepting(app)) == 2, 60)
    app.until(lambda: [each["running"] for each in state(app)["autoscaling"]["targets"]] == [2], 60)
    app.until(lambda: [router["answering"] for router in state(app)["routers"]] == [True] * 2, 60)
    app.until(lambda: max(each["report_age_s"] for each in state(app)["replicas"]) < 2, 60)
    seen = state(app)
    said = app.log.read_text()
    assert f"watch it: {app.url}/manta/ (asks for the admin key)" in said
    assert said.index("watch it:") < said.index("ready: ")
    assert (seen["model"], seen["mode"]) == ("SmolLM2-135M-Instruct", "unified")
    for replica in seen["replicas"]:
        [pool] = replica["pools"]
        states = ("free", "evictable", "protected", "reserved", "quarantined")
        assert sum(pool[name] for name in states) == pool["capacity"] == 8_000
    [target] = seen["autoscaling"]["targets"]
    counts = [target[name] for name in ("role", "running", "desired", "minimum", "maximum")]
    assert counts == ["unified", 2, 2, 2, 2]


def test_every_process_is_found_and_its_metrics_come_one_by_one_and_all_together(app: Running) -> None:
    app.until(lambda: len(get(app, "/sd").json()) == 5, 15)  # two replicas, two routers, the observatory
    entries = get(app, "/sd").json()
    assert all(entry["labels"].keys() == {"node"} for entry in entries)
    addresses = [entry["targets"][0] for entry in entries]
    assert [HTTP.get(f"http://{address}/metrics", timeout=30).status_code for address in addresses] == [401] * 5
    alone = [HTTP.get(f"http://{address}/metrics", headers=SHOWN, timeout=30).text for address in addresses]
    together = get(app, "/metrics").text
    names = [{line.partition(" ")[0] for line in text.splitlines() if line.startswith("manta_")} for text in alone]
    assert set().union(*names) == {line.partition(" ")[0] for line in together.splitlines() if line[0] != "#"}
    assert sum(map(len, names)) == len(set().union(*names))  # no series is two processes'
    types = [line for line in together.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    assert "did not answer" not in together
    assert "manta_autoscaler_replicas" in together


def test_the_openai_client_needs_one_of_the_files_keys_and_the_operator_the_admins(app: Running) -> None:
    """Through HAProxy. The file gives the admin key to the observatory; the routers ask for the same one."""
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    for key in (API_KEY, KEY):
        client = openai.OpenAI(base_url=f"{app.url}/v1", api_key=key, max_retries=0)
        answer = client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=question, temperature=0)
        assert answer.choices[0].message.content == "The capital of France is Paris."
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
        openai.OpenAI(base_url=f"{app.url}/v1", api_key="unused", max_retries=0).models.list()
    for path in ("/get_server_info", "/metrics", "/flush_cache"):
        shown = [{}, {"x-api-key": API_KEY}, SHOWN]
        statuses = [HTTP.get(f"{app.url}{path}", headers=each, timeout=30).status_code for each in shown]
        assert statuses == [401, 401, 200], path
    assert HTTP.get(f"{app.url}/health", timeout=30).status_code == 200


def test_the_key_is_asked_for_and_stands_in_no_log(app: Running) -> None:
    for headers, status in (({}, 401), ({"Accept": "text/html"}, 303), (SHOWN, 200)):
        assert HTTP.get(f"{app.url}/manta/api/state", headers=headers, timeout=30).status_code == status
    assert KEY not in json.dumps(app.info())
    folder = haproxy.private_folder(Path(tempfile.gettempdir())) / "ray" / "session_latest" / "logs"
    logs = [file for file in folder.rglob("*") if file.is_file()]
    assert any("asks for the admin key" in file.read_text(errors="replace") for file in logs)
    assert any("Importing application 'observatory'" in file.read_text(errors="replace") for file in logs)
    texts = {file.name: file.read_text(errors="replace") for file in logs}
    assert [name for name, text in texts.items() if KEY in text or API_KEY in text] == []
