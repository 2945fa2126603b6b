"""Prints what is served and where, with a command to try; the live view's address already while the models load.

Never: fails because a server does not answer: its line is left out.
"""

import http.client
import json
import os
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deployments.command.arguments import URL as DEFAULT_URL
from deployments.places import VERSION
from deployments.settings.roles import DEPLOYMENTS, config_of, roles_of
from deployments.settings.schema import AppConfig
from deployments.settings.settings_file import OBSERVATORY
from deployments.tenancy.keys import KEY_VARIABLE
from deployments.watch.terminal.ask import opened
from deployments.watch.terminal.keyboard import on_terminal
from routing.types import Role

ANSWER_S = 2.0
OPENS_S = 15.0
LOOK_S = 0.25
EVENTS_S = 1.0  # between two questions for events
HELD = 5  # questions for which an event waits until the number of its requests is known
# the last three: an answer of an unexpected form, such as that of another server at the address
UNANSWERED = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)


def announce(
    schema: ServeDeploySchema,
    configs: dict[str, AppConfig],
    applications: dict[str, ApplicationStatusOverview],
    say: Callable[[str], None],
    *,
    watched_at: Iterable[str],
    logs: str,
    out: TextIO | None = None,
) -> None:
    """Print a box with what is served, on what, and where; below it, for each model, a command to paste.

    Args: watched_at: addresses of the live views; logs: their folder; out: by default standard output.
    """
    out = sys.stdout if out is None else out
    urls = {each.name: _url(schema, each.route_prefix) for each in schema.applications}
    rows: list[tuple[str, str]] = []
    for each in schema.applications:
        if each.import_path != OBSERVATORY:  # of which `Observatories` has had an answer
            wait_open(urls[each.name])
    for name, config in configs.items():
        counts = {
            role: applications[name].deployments[DEPLOYMENTS[role]].replica_states.get("RUNNING", 0)
            for role in roles_of(config)
        }
        say(f"ready: {config.model.name} on {counted(counts)} at {urls[name]}/v1")
        rows += [("model", f"{config.model.name} on {counted(counts)}"), *_engines(_replicas(urls[name]), config)]
        rows.append(("API", f"{urls[name]}/v1"))
        rows.append(("try", f"{program()} chat{'' if urls[name] == DEFAULT_URL else f' --url {urls[name]}'}"))
    rows += [("live view", told) for told in watched_at]
    rows += [("metrics", f"{_url(schema, each.route_prefix)}/metrics")
             for each in schema.applications if each.import_path == OBSERVATORY]  # fmt: skip
    rows += [("logs", logs), ("stop", "Ctrl-C")]
    show_box(f"Manta {VERSION}", rows, out)
    for name, config in configs.items():
        line = curl(urls[name], config.model.name, with_key=config.router.known_keys().asked)
        print(f"\nTry it:\n\n{line}\n", file=out, flush=True)


def show_box(title: str, rows: list[tuple[str, str]], out: TextIO) -> None:
    """Print rows of (name, text): in a box on a terminal, as indented lines elsewhere."""
    if on_terminal(out):
        grid = Table.grid(padding=(0, 2))
        for name, said in rows:
            grid.add_row(Text(name, style="bold"), Text(said, overflow="fold"))
        Console(file=out).print(Panel(grid, title=title, title_align="left", expand=False))
    else:
        print(f"\n{title}", *(f"  {name:<10}{said}" for name, said in rows), sep="\n", file=out, flush=True)


class Observatories:
    """The observatories of a file; prints the address of each, and whether it needs a key, as soon as it runs."""

    def __init__(self, schema: ServeDeploySchema, say: Callable[[str], None]) -> None:
        observatories = (each for each in schema.applications if each.import_path == OBSERVATORY)
        self._urls = {each.name: _url(schema, each.route_prefix) for each in observatories}
        self.urls = tuple(self._urls.values())
        self._say = say
        self.addresses: list[str] = []  # of those that run, and whether they need a key

    def look(self, applications: Mapping[str, ApplicationStatusOverview], *, last: bool = False) -> None:
        """Report the observatories that have started. Args: last: report those without an answer too."""
        for name, url in list(self._urls.items()):
            if name in applications and applications[name].status is ApplicationStatus.RUNNING:
                open_to = _open_to(url)
                if open_to or last:
                    del self._urls[name]
                    self.addresses.append(f"{url}/{open_to}")
                    self._say(f"watch it: {url}/{open_to}")


class EventLines:
    """Prints what happens to the replicas, as the observatories tell, on a thread of its own until the process ends.

    An event that counts requests waits until the count stands still, and those behind it with it: which requests go on
    elsewhere is known a second or more after a death.
    """

    def __init__(self, urls: Iterable[str], out: TextIO) -> None:
        self._seen: dict[str, int | None] = dict.fromkeys(urls)  # number of the last event; None: it has not answered
        self._held: dict[str, list[str]] = {}  # url -> how the event that waits there was told at each question
        self._out = out

    def start(self) -> None:
        threading.Thread(target=self._go_on, daemon=True, name="events").start()

    def look(self) -> None:
        """Print what has come since the first look; an observatory that does not answer is asked again."""
        for url, seen in list(self._seen.items()):
            asked = _with_key(f"{url}/api/events?since={seen or 0}")
            try:
                with opened(asked, timeout_s=ANSWER_S, is_ours=True) as answer:
                    events = json.load(answer)["events"]
                    lines = [(each["seq"], _event_line(each)) for each in events]
            except UNANSWERED:
                continue
            if seen is not None:
                lines = lines[: self._known(url, events)]
                print(*(line for _, line in lines), sep="\n", end="\n" * bool(lines), file=self._out, flush=True)
            self._seen[url] = max([seen or 0, *(seq for seq, _ in lines)])

    def _known(self, url: str, events: list[dict[str, Any]]) -> int:
        """Return how many of the first ``events`` need not wait."""
        for index, each in enumerate(events):
            if each.get("requests") is None:
                continue
            held = self._held.get(url, []) if index == 0 else []
            if len(held) < HELD and not (each["requests"] and held[-1:] == [each["text"]]):
                self._held[url] = [*held, each["text"]]
                return index
            del self._held[url]
        return len(events)

    def _go_on(self) -> None:
        while True:
            self.look()
            time.sleep(EVENTS_S)


def _open_to(url: str) -> str:
    """Ask the observatory whether it needs a key. Returns: "" without an answer, as before Serve's proxy knows it."""
    try:
        with opened(urllib.request.Request(f"{url}/api/state"), timeout_s=ANSWER_S, is_ours=True):
            return " (asks for no key)"
    except urllib.error.HTTPError as error:
        return " (asks for the admin key)" if error.code == 401 else ""
    except UNANSWERED:
        return ""


def wait_open(url: str, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Return once the API at ``url`` answers anything but 503, after OPENS_S at most: HAProxy learns of a router that
    runs a second after Serve, and says until then that Manta starts (haproxy_no_splice.sh)."""
    for _ in range(round(OPENS_S / LOOK_S)):
        try:
            opened(urllib.request.Request(f"{url}/ping"), timeout_s=ANSWER_S, is_ours=True).close()
        except urllib.error.HTTPError as error:
            if error.code == 503:
                pause(LOOK_S)
                continue
        except UNANSWERED:
            return
        return


def _url(schema: ServeDeploySchema, route_prefix: str | None) -> str:
    """Write an application's address, without a slash at the end."""
    host = "127.0.0.1" if schema.http_options.host == "0.0.0.0" else schema.http_options.host
    return f"http://{host}:{schema.http_options.port}{(route_prefix or '/').rstrip('/')}"


def counted(counts: Mapping[Role, int]) -> str:
    """Write the number of replicas of each role in words."""
    named = [
        f"{count} {'' if role is Role.UNIFIED else f'{role.value} '}replica{'s' if count != 1 else ''}"
        for role, count in counts.items()
    ]
    return " and ".join(named)


def _replicas(url: str) -> list[dict[str, Any]]:
    """Ask the API for the description of each replica; none if it does not answer."""
    try:
        with opened(_with_key(f"{url}/get_server_info"), timeout_s=10, is_ours=True) as answer:
            return [state["replica"] for state in json.load(answer)["internal_states"]]
    except UNANSWERED:
        return []


def _event_line(event: Mapping[str, Any]) -> str:
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event['time']))} UTC] {event['text']}"


def _with_key(url: str) -> urllib.request.Request:
    """Make a question that shows the admin key, where there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})


def _engines(replicas: list[dict[str, Any]], config: AppConfig) -> list[tuple[str, str]]:
    """Make rows about devices, number formats and pools; replicas that are alike share a row."""
    try:
        computes = [_computes(each, config) for each in replicas]
        pools = _alike([str(each["pool"]) for each in replicas])
    except KeyError:
        return []
    return [
        (name, said if number == 1 else f"{said}, each of {number}")
        for name, all_said in (("computes", computes), ("KV pool", pools))
        for said, number in Counter(all_said).items()
    ]


def _alike(pools: list[str]) -> list[str]:
    """Write pools that differ by 2 % at most as one: replicas find a little more or less memory."""
    sizes = [int(each.partition(" ")[0].replace(",", "")) for each in pools]
    least = min(sizes, default=0)
    if len(set(pools)) < 2 or least < 0.98 * max(sizes):
        return pools
    return [f"about {least - least % 100:,} tokens"] * len(pools)


def _computes(replica: Mapping[str, Any], config: AppConfig) -> str:
    role = Role(replica.get("role", Role.UNIFIED.value))
    device = "a GPU" if config_of(config, role).replicas.gpus else "the CPU"
    ranks = f", {replica['tp']} ranks" if replica["tp"] > 1 else ""
    threads = f", {replica['num_threads']} threads" if device == "the CPU" and replica["num_threads"] > 1 else ""
    kinds = {"none": "", "int8": ", int8 products", "int4": " with 4-bit weights", "fp8": " with fp8 weights"}
    products = kinds[config.model.quantization]
    why = f" ({replica['attention_why']})" if replica.get("attention_why") else ""
    dtype = replica["dtype"]
    if device == "the CPU" and dtype != "float32":
        products = f"{products} and {dtype} activations of products" if products else f" with {dtype} weights"
        dtype = "float32"
    return f"on {device} in {dtype}{products}{ranks}{threads}, attention: {replica['attention']}{why}"


def program() -> str:
    """Write how `manta` is called from here: by its name, its path, or as a module."""
    script, here = Path(sys.executable).with_name("manta"), Path.cwd()
    if shutil.which("manta"):
        return "manta"
    called = script if script.exists() else Path(sys.executable)
    shown = str(called.relative_to(here)) if called.is_relative_to(here) else str(called)
    return shown if called == script else f"{shown} -m deployments"


def curl(url: str, model: str, *, with_key: bool = False) -> str:
    """Write a command to paste, in short lines. Args: with_key: send the key that the shell has in KEY."""
    message = {"role": "user", "content": "What is the capital of France?"}
    sampling = '"max_tokens": 32, "temperature": 0'
    asked = f'{{"model": {json.dumps(model)}, {sampling},\n       "messages": {json.dumps([message])}}}'
    key = ' \\\n  -H "Authorization: Bearer $KEY"' if with_key else ""
    return f"curl {url}/v1/chat/completions{key} \\\n  -H 'Content-Type: application/json' \\\n  -d '{asked}'"
