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
SHARED = "A long story about pages and trees, told slowly. " * 12


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


def ask(app: Running, text: str, name: str = "", max_tokens: int = 4) -> int:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": name, "x-api-key": API_KEY} if name else {"x-api-key": API_KEY}
    return HTTP.post(f"{app.url}/v1/completions", json=body, headers=headers, timeout=120).status_code


def row_of(app: Running, rid: str) -> dict[str, Any] | None:
    return next((row for row in state(app)["requests"] if row["rid"] == rid), None)


def accepting(app: Running) -> list[str]:
    return [each["id"] for each in state(app)["replicas"] if each["state"] == "accepting"]


def test_the_root_of_the_api_leads_a_browser_to_the_live_view(app: Running) -> None:
    led = HTTP.get(app.url, headers={"Accept": "text/html,*/*;q=0.8"}, follow_redirects=False)
    assert (led.status_code, led.headers["location"]) == (307, "/manta/")
    assert HTTP.get(app.url).json() == {"name": "manta", "live_view": "/manta/", "document": "/openapi.json"}


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


def test_a_request_is_shown_with_its_stages_its_explanation_and_its_path_in_the_tree(app: Running) -> None:
    assert ask(app, SHARED + "One?", "first") == 200
    assert ask(app, SHARED + "Two?", "second") == 200
    app.until(lambda: (row_of(app, "second") or {}).get("total_s") is not None, 60)
    row = row_of(app, "second")
    assert row is not None
    assert (row["outcome"], row["output_tokens"], row["tries"]) == ("ok", 4, 1)
    assert row["cached_tokens"] >= 96
    assert sum(row["stages"].values()) == pytest.approx(row["total_s"], abs=1e-6)
    told = get(app, "/api/requests/second").json()
    assert told["route"]["replica"] == told["row"]["replica"] == row["replica"]
    assert len(told["route"]["tries"][0]["candidates"]) == 2
    tree = get(app, "/api/tree", params={"replica": row["replica"], "depth": 4}).json()
    [trunk] = [node for node in tree["root"]["children"] if node["key"] in told["page_keys"]]
    assert trunk["tokens"] >= 96  # the prefix that both share
    assert tree["tokens"] >= trunk["subtree_tokens"]


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


def test_what_is_not_there_is_said_in_the_houses_words(app: Running) -> None:
    unknown = get(app, "/api/tree", params={"replica": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "replica_not_found")
    assert get(app, "/api/requests/nobody").json()["error"]["code"] == "request_not_found"
    assert get(app, "").status_code == 307  # without its slash the page's links would lead elsewhere
    assert get(app, "").headers["location"] == "/manta/"


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


def test_a_viewer_gets_all_and_then_what_changed_and_is_counted_while_it_polls(app: Running) -> None:
    """Through Serve's proxy, zipped."""

    def num_viewers() -> float:
        lines = get(app, "/metrics").text.splitlines()
        [line] = [line for line in lines if line.startswith("manta_observatory_viewers{")]
        return float(line.rpartition(" ")[2])

    def nothing_new() -> bool:
        """Of what other tests asked, two polls long."""
        version = get(app, "/api/state").json()["version"]
        news = {"since": version}
        app.until(lambda: get(app, "/api/state", params=news).json()["version"] >= version + 2, 30)
        return not get(app, "/api/state", params=news).json()["requests"]

    app.until(nothing_new, 60)
    first = get(app, "/api/state")
    assert first.headers["content-encoding"] == "gzip"
    whole = first.json()
    assert (whole["whole"], whole["keys"], whole["api"], whole["facts"]["dtype"]) == (
        True, {"admin": True}, "/", "float32",
    )  # fmt: skip
    assert 0 < whole["time"] - whole["started"] < 3600
    asked = ask(app, "A request between two polls.", "between")
    app.until(lambda: (row_of(app, "between") or {}).get("total_s") is not None, 60)
    answer = get(app, "/api/state", params={"since": whole["version"]}).json()
    assert (asked, answer["whole"], [row["rid"] for row in answer["requests"]]) == (200, False, ["between"])
    assert len(answer["history"]["points"]) == answer["version"] - whole["version"]
    figures = {each["name"]: each for each in answer["figures"]}
    [row] = answer["requests"]
    assert figures["ttft"]["more"]["p99"] >= row["ttft_s"] * 0.99
    assert 0 < figures["itl"]["value"] < 10
    assert (figures["errors"]["value"], figures["errors"]["level"]) == (0.0, "ok")
    assert num_viewers() >= 1
    app.until(lambda: num_viewers() == 0, 60)
