"""The admin key reaches the place where the observatory is built, and a start says to whom it is open."""

import os
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deployments.command.announce import Observatories, announce, wait_open
from deployments.command.serve import settle_key
from deployments.settings.schema import RouterSettings
from deployments.settings.settings_file import OBSERVATORY
from deployments.tenancy.keys import KEY_VARIABLE, KEYS_VARIABLE
from deployments.watch.observatory.app import build
from deployments.watch.observatory.parts import AdminKey
from deployments.watch.observatory.settings import check_one_key, key_sent, parse
from replicas.errors import InvalidConfig
from tests.unit.deployments.listening import answering, speaking

KEY = "of the operator's shell"


def schema(*args: dict[str, Any], port: int = 8000) -> ServeDeploySchema:
    applications = [
        {"name": f"observatory{number}", "route_prefix": f"/manta{number}", "import_path": OBSERVATORY, "args": each}
        for number, each in enumerate(args)
    ]
    return ServeDeploySchema.model_validate({"applications": applications, "http_options": {"port": port}})


def test_the_key_of_the_shell_goes_to_a_cluster_that_has_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    said: list[str] = []
    found = schema({}, {"admin_key": "of the file"})
    settle_key(found, said.append, on_cluster=True)
    assert [each.runtime_env.get("env_vars") for each in found.applications] == [{KEY_VARIABLE: KEY}, None]
    assert len(said) == 1
    assert "goes to the cluster as runtime_env of observatory0" in said[0]
    assert KEY not in said[0]


def test_a_runtime_env_keeps_what_it_has_and_its_own_key_comes_first() -> None:
    environment = {KEY_VARIABLE: KEY}
    given = {"pip": ["x"], "env_vars": {"A": "1"}}
    assert key_sent({}, given, environment) == {"pip": ["x"], "env_vars": {"A": "1", KEY_VARIABLE: KEY}}
    assert given["env_vars"] == {"A": "1"}
    assert key_sent({}, {"env_vars": {KEY_VARIABLE: "of the file"}}, environment) is None
    assert key_sent({}, {}, {}) is None


def test_on_a_ray_of_our_own_the_key_leaves_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "before")
    found = schema({"application": "a", "admin_key": KEY})
    settle_key(found, lambda text: None, on_cluster=False)
    [application] = found.applications
    assert (application.args, application.runtime_env) == ({"application": "a"}, {})


def test_the_routers_keys_go_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The admin key of the file leaves the arguments for our environment; to a cluster go both of the shell's."""
    monkeypatch.setenv(KEYS_VARIABLE, "a-key-of-a-client")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    api = {"name": "manta", "import_path": "deployments.app:build", "args": {"router": {"admin_key": KEY, "count": 2}}}
    ours, theirs = (ServeDeploySchema.model_validate({"applications": [api]}) for _ in range(2))
    said: list[str] = []
    settle_key(theirs, said.append, on_cluster=True)
    assert theirs.applications[0].runtime_env == {"env_vars": {KEYS_VARIABLE: "a-key-of-a-client"}}
    assert [text.partition(" goes")[0] for text in said] == ["MANTA_API_KEYS of this shell"]
    monkeypatch.setenv(KEY_VARIABLE, "before, and replaced")
    settle_key(ours, said.append, on_cluster=False)
    assert ours.applications[0].args == {"router": {"count": 2}}
    assert os.environ[KEY_VARIABLE] == KEY


def test_two_observatories_of_one_environment_cannot_have_two_keys() -> None:
    one, two = {"admin_key": "first-key-1"}, {"admin_key": "second-key-2"}
    for both, environment in (([one, two], {}), ([one, {}], {KEY_VARIABLE: "another one"})):
        with pytest.raises(InvalidConfig, match="give them all the same admin_key, or leave it out") as refused:
            check_one_key(both, environment)
        assert "first-key" not in str(refused.value)
    check_one_key([one, one, {}], {})
    with pytest.raises(InvalidConfig):
        settle_key(schema(one, two), lambda text: None, on_cluster=False)


@pytest.mark.parametrize("given", ["  with spaces\n", "with spaces"])
def test_white_space_around_a_key_does_not_count(given: str) -> None:
    """As of a file's last line, or of a secret that was mounted."""
    key = AdminKey(given)
    assert parse({"admin_key": given}).key == "with spaces"
    assert key.admits({"authorization": "Bearer with spaces "}, {}, 0.0)
    assert key.is_right("with spaces\n")
    assert not key.is_right("withspaces")
    with pytest.raises(InvalidConfig, match="at least 8 characters"):
        parse({"admin_key": "short        "})


def test_its_own_lines_are_json_where_that_is_asked_for() -> None:
    config = build({"log_format": "json"})._bound_deployment._deployment_config.logging_config
    assert config["encoding"] == "JSON"
    assert build({})._bound_deployment._deployment_config.logging_config is None
    with pytest.raises(InvalidConfig, match="log_format: must be 'text' or 'json', not 'xml'"):
        build({"log_format": "xml"})


def statuses(status: ApplicationStatus) -> dict[str, Any]:
    loads = SimpleNamespace(status=ApplicationStatus.DEPLOYING)
    return {"observatory0": SimpleNamespace(status=status), "manta": loads}


@pytest.mark.parametrize(("status", "open_to"), [(401, " (asks for the admin key)"), (200, " (asks for no key)")])
def test_where_to_watch_is_said_once_when_it_runs_whatever_the_models_do(status: int, open_to: str) -> None:
    said, answers = list[str](), [404, status]  # at first it runs, and the proxy has not heard of it
    with answering(lambda *_: (answers.pop(0), b"{}")) as port:
        observatories = Observatories(schema({}, port=port), said.append)
        for state in (ApplicationStatus.DEPLOYING, ApplicationStatus.RUNNING):
            observatories.look(statuses(state))
        assert said == []
        for _ in range(2):
            observatories.look(statuses(ApplicationStatus.RUNNING))
    assert said == [f"watch it: http://127.0.0.1:{port}/manta0/{open_to}"]


def test_ready_is_said_when_haproxy_has_heard_of_the_router_too() -> None:
    """It hears after Serve has said RUNNING, and answers 503 until then: who believed "ready" would get that."""
    answers, pauses = [503, 503, 200, 503], list[float]()
    with answering(lambda *_: (answers.pop(0), b"{}")) as port:
        wait_open(f"http://127.0.0.1:{port}", pause=pauses.append)
    assert (len(pauses), answers) == (2, [503])
    with answering(lambda *_: (503, b"{}")) as port:
        wait_open(f"http://127.0.0.1:{port}", pause=pauses.append)
    assert sum(pauses[2:]) == 15
    wait_open(f"http://127.0.0.1:{port}", pause=pauses.append)  # nobody is there
    assert len(pauses) == 62


def test_a_start_waits_for_haproxy_before_an_application_that_is_not_ours_too() -> None:
    answers = [503, 503, 404]  # the last: it is there, and has no /ping
    other = {"name": "other", "route_prefix": "/", "import_path": "other.app:build"}
    with answering(lambda *_: (answers.pop(0), b"{}")) as port:
        found = ServeDeploySchema.model_validate({"applications": [other], "http_options": {"port": port}})
        announce(found, {}, {}, lambda text: None, watched_at=[], logs="/l")
    assert answers == []


NO_ANSWERS = (b"{}", b"[]", b'{"internal_states": [{}]}', b"<html>")


@pytest.mark.parametrize("server", [speaking(b"SSH-2.0-OpenSSH\r\n")] + [
    answering(lambda *_, body=body: (200, body)) for body in NO_ANSWERS
])  # fmt: skip
def test_a_start_does_not_fail_for_an_answer_that_cannot_be_read(server: AbstractContextManager[int]) -> None:
    said: list[str] = []
    manta = {"name": "manta", "route_prefix": "/", "import_path": "deployments.app:build"}
    config: Any = SimpleNamespace(mode="unified", model=SimpleNamespace(name="tiny"), router=RouterSettings())
    running = SimpleNamespace(replica_states={"RUNNING": 1})
    application: Any = SimpleNamespace(deployments={"ModelReplica": running})
    with server as port:
        found = ServeDeploySchema.model_validate({"applications": [manta], "http_options": {"port": port}})
        announce(found, {"manta": config}, {"manta": application}, said.append, watched_at=[], logs="/l")
    assert said == [f"ready: tiny on 1 replica at http://127.0.0.1:{port}/v1"]


def test_what_does_not_answer_is_said_at_the_end_all_the_same() -> None:
    said: list[str] = []
    observatories = Observatories(schema({}, port=1), said.append)
    observatories.look(statuses(ApplicationStatus.RUNNING), last=True)
    assert said == ["watch it: http://127.0.0.1:1/manta0/"]
