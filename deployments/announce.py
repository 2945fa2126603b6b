"""What is served where, said once all of it runs, with a line to try.

Never: fails for want of an answer: what cannot be asked is left out.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping

from ray.serve.schema import ApplicationStatusOverview, ServeDeploySchema

from deployments.roles import DEPLOYMENTS, roles_of
from deployments.schema import AppConfig
from routing.types import Role

OBSERVATORY = "deployments.observatory.app:build"


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
    for application in schema.applications:
        if application.import_path == OBSERVATORY:
            say(f"watch it: {urls[application.name]}/")
    for name, config in configs.items():
        print(f"\nTry it:\n\n{curl(urls[name], config.model.name)}\n\nCtrl-C stops everything.\n", flush=True)


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
    try:
        with urllib.request.urlopen(f"{url}/get_server_info", timeout=10) as answer:
            states = json.load(answer)["internal_states"]
    except (OSError, ValueError):
        return []
    return [f"replica {state['replica']['replica_id']}: KV pool of {state['replica']['pool']}" for state in states]


def curl(url: str, model: str) -> str:
    """A line to paste."""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 32})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
