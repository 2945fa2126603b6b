"""What is served where, said once it runs, with a line to try: the live view while the models still load.

Never: fails for want of an answer: what cannot be asked is left out.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema

from deployments.keys import KEY_VARIABLE
from deployments.roles import DEPLOYMENTS, roles_of
from deployments.schema import AppConfig
from routing.types import Role

OBSERVATORY = "deployments.observatory.app:build"
ANSWER_S = 2.0
# the last three: an answer of another form, such as another server's behind the same address
UNANSWERED = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)


def announce(
    schema: ServeDeploySchema,
    configs: dict[str, AppConfig],
    applications: dict[str, ApplicationStatusOverview],
    say: Callable[[str], None],
) -> None:
    """Pools, addresses, and for each model a line to paste."""
    urls = {each.name: _url(schema, each.route_prefix) for each in schema.applications}
    for name, config in configs.items():
        counts = {
            role: applications[name].deployments[DEPLOYMENTS[role]].replica_states.get("RUNNING", 0)
            for role in roles_of(config)
        }
        for line in _pools(urls[name]):
            say(line)
        say(f"ready: {config.model.name} on {counted(counts)} at {urls[name]}/v1")
    for name, config in configs.items():
        line = curl(urls[name], config.model.name, with_key=bool(config.router.keys().api))
        print(f"\nTry it:\n\n{line}\n\nCtrl-C stops everything.\n", flush=True)


class Observatories:
    """Says once of each observatory where it is and to whom it is open, as soon as it runs."""

    def __init__(self, schema: ServeDeploySchema, say: Callable[[str], None]) -> None:
        observatories = (each for each in schema.applications if each.import_path == OBSERVATORY)
        self._urls = {each.name: _url(schema, each.route_prefix) for each in observatories}
        self._say = say

    def look(self, applications: Mapping[str, ApplicationStatusOverview], *, last: bool = False) -> None:
        """``last``: what does not answer yet is said too, since nobody looks again."""
        for name, url in list(self._urls.items()):
            if name in applications and applications[name].status is ApplicationStatus.RUNNING:
                open_to = _open_to(url)
                if open_to or last:
                    del self._urls[name]
                    self._say(f"watch it: {url}/{open_to}")


def _open_to(url: str) -> str:
    """As the observatory has it, whatever the settings say; nothing when it does not answer, as before Serve's proxy
    has heard of it."""
    try:
        with urllib.request.urlopen(f"{url}/api/state", timeout=ANSWER_S):
            return " (open to everybody)"
    except urllib.error.HTTPError as error:
        return " (asks for the admin key)" if error.code == 401 else ""
    except UNANSWERED:
        return ""


def _url(schema: ServeDeploySchema, route_prefix: str | None) -> str:
    """Without a slash at its end."""
    host = "127.0.0.1" if schema.http_options.host == "0.0.0.0" else schema.http_options.host
    return f"http://{host}:{schema.http_options.port}{(route_prefix or '/').rstrip('/')}"


def counted(counts: Mapping[Role, int]) -> str:
    """How many of each role, in words."""
    named = [
        f"{count} {'' if role is Role.UNIFIED else f'{role.value} '}replica{'s' if count != 1 else ''}"
        for role, count in counts.items()
    ]
    return " and ".join(named)


def _pools(url: str) -> list[str]:
    """What each replica has for K and V, a line each; none when it cannot be asked, which is no reason to fail."""
    key = os.environ.get(KEY_VARIABLE)
    asked = urllib.request.Request(f"{url}/get_server_info", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            states = json.load(answer)["internal_states"]
        return [f"replica {state['replica']['replica_id']}: KV pool of {state['replica']['pool']}" for state in states]
    except UNANSWERED:
        return []


def curl(url: str, model: str, *, with_key: bool = False) -> str:
    """A line to paste. ``with_key``: API keys are asked for; the shell has one in KEY."""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 32})
    key = ' -H "Authorization: Bearer $KEY"' if with_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
