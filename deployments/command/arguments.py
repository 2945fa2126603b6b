"""The command line of `manta`: its commands, their options, and help with an example for each.

Owns:      FLAGS, the settings that a command line can give: one row for each.
Never:     imports anything large: `manta --help` answers at once.
"""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from deployments.settings.settings_file import HTTP, OURS, PORT, CommandLine, Given, SettingChange, here
from deployments.tenancy.keys import KEY_VARIABLE

CONFIG = "serve_config.yaml"
FILES = (".yaml", ".yml", ".json")  # endings of settings files; anything else is a model
URL = f"http://127.0.0.1:{PORT}"
API_KEY_VARIABLE = "MANTA_API_KEY"
CONFIGURED = ("serve", "run", "check", "doctor")  # commands that take settings
NAMED = {"list": (), "load": ("NAME", "FOLDER"), "unload": ("NAME",)}  # actions of `manta adapters`, and their words
PASSED_ON = ("dashboards",)  # commands with command lines of their own
EXAMPLES = {
    "serve": "manta serve models/SmolLM2-135M-Instruct --port 8001",
    "run": "echo 'Name three colours.' | manta run models/SmolLM2-135M-Instruct",
    "check": "manta check other.yaml",
    "top": "manta top --once",
    "explain": "manta explain chatcmpl-4f2a",
    "why": "manta why --last 1h",
    "kill": "manta kill 1 --yes",
    "chat": "echo 'Name three colours.' | manta chat --max-tokens 32",
    "batch": "manta batch",
    "adapters": "manta adapters load poet /adapters/poet",
    "logs": "manta logs router --follow",
    "list": "manta list",
    "pull": "manta pull Qwen/Qwen3-0.6B",
    "bench": "manta bench --for 60s --concurrency 8",
    "dashboards": "manta dashboards export watch",
    "doctor": "manta doctor --json",
    "key": "manta key new",
    "settings": "manta settings > settings.md",
}


def _url(path: str) -> str:
    return path if "://" in path else Path(path).expanduser().resolve().as_uri()


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting that a command line can give. Its name in vLLM and in SGLang, where they have it, is taken too."""

    name: str
    setting: str
    metavar: str
    told: str
    read: Callable[[str], Any] = yaml.safe_load  # of the word that follows the flag

    @property
    def names(self) -> list[str]:
        """Its own name, and those of the others that take the same kind of value: their switches take none."""
        theirs = [name for name, setting in OURS.items() if setting == self.setting and not name.startswith(SWITCHES)]
        return list(dict.fromkeys([self.name, *(f"--{name.replace('_', '-')}" for name in theirs)]))


SWITCHES = ("enable_", "disable_", "enforce_", "async_")
FLAGS = (
    Flag("--host", f"{HTTP}.host", "HOST", "listen here; 0.0.0.0: everywhere (default: this machine alone)", str),
    Flag("--port", f"{HTTP}.port", "PORT", f"listen at this port (default {PORT})"),
    Flag("--served-model-name", "model.served_name", "NAME", "name that requests use", str),
    Flag("--revision", "model.revision", "COMMIT", "commit, branch or tag of a hub id", str),
    Flag("--dtype", "model.dtype", "TYPE", "float32, bfloat16 or float16"),
    Flag("--quantization", "model.quantization", "KIND", "int8 or int4 on a CPU, fp8 on a GPU"),
    Flag("--ctx", "model.context_len", "TOKENS", "longest prompt and output together"),
    Flag("--replicas", "replicas.count", "N", "number of replicas, or auto"),
    Flag("--cpus", "replicas.cpus", "N", "CPUs of each rank"),
    Flag("--gpus", "replicas.gpus", "N", "GPUs of each rank; 0: on the CPU"),
    Flag("--tp", "parallel.tp", "N", "ranks of a replica (tensor parallel)"),
    Flag("--kv-dtype", "cache.kv_dtype", "TYPE", "number format of K and V"),
    Flag("--memory", "cache.device_memory_bytes", "SIZE", "of a replica for weights and K/V, such as 4GiB"),
    Flag("--mem-fraction-static", "cache.mem_fraction_static", "SHARE", "of a GPU's memory for weights and K/V"),
    Flag("--max-total-tokens", "cache.max_total_tokens", "N", "cap on the KV pool"),
    Flag("--page-size", "cache.page_size", "TOKENS", "tokens of a page"),
    Flag("--eviction", "cache.eviction", "POLICY", "which cached prefix goes first"),
    Flag("--store", "cache.store", "PATH", "folder or s3://bucket/prefix that keeps pages beyond memory", _url),
    Flag("--max-running-requests", "scheduler.max_running_requests", "N", "requests that run at once"),
    Flag("--chunked-prefill-size", "scheduler.chunked_prefill_size", "TOKENS", "most new tokens of a step"),
    Flag("--schedule-policy", "scheduler.policy", "POLICY", "order of the queue"),
    Flag("--attention-backend", "attention", "NAME", "auto, or a backend's name"),
    Flag("--router-policy", "router.policy", "POLICY", "how a replica is chosen"),
    Flag("--api-key-file", "router.api_key_file", "FILE", "file of API keys, one a line", str),
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """A parser whose message about an unknown command names the nearest one, and about a flag of vLLM's or SGLang's our
    setting."""

    def error(self, message: str) -> NoReturn:
        unknown, _, words = message.partition("unrecognized arguments: ")
        if not unknown and (ours := here(words.partition(" ")[0].partition("=")[0])):
            super().error(f"{message}; here it is {ours}, in a settings file (`manta serve MODEL --print-config`)")
        given = message.partition("argument COMMAND: invalid choice: '")[2].partition("'")[0]
        near = difflib.get_close_matches(given, EXAMPLES, n=1, cutoff=0.5)
        super().error(f"there is no command {given!r}; did you mean {near[0]!r}?" if near else message)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what follows a command of PASSED_ON is in ``rest``, unread."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in PASSED_ON:
        return argparse.Namespace(version=False, command=given[0], rest=given[1:])
    parser = _parser()
    args = parser.parse_args(given or ["--help"])
    if args.command == "adapters" and len(args.names) != len(NAMED[args.action]):
        wanted = " ".join(NAMED[args.action]) or "no name"
        parser.error(f"adapters {args.action} needs {wanted}: {EXAMPLES['adapters']!r} gives a name")
    if "model" in args and args.command in CONFIGURED:
        args.config = _settings_of(args, parser)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="manta", description="Serve language models, and watch what is served.",
        epilog="`manta COMMAND --help` has the options of a command and an example.",
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the versions of Manta and what it runs on")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, told: str) -> argparse.ArgumentParser:
        description, example = f"{told[0].upper()}{told[1:]}.", f"example:\n  {EXAMPLES[name]}"
        form = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(name, help=told, description=description, epilog=example, formatter_class=form)

    serve = add("serve", "start Ray and serve the models of a settings file until Ctrl-C")
    run = add("run", "serve a model, chat with it, and stop serving it")
    check = add("check", "check a settings file, list all errors, and start nothing")
    _add_clients(add)
    logs = add("logs", "print the logs of a Manta of this machine, which may have ended, and follow them")
    logs.add_argument("replica", nargs="?", default="", metavar="REPLICA", help="a replica's id, or another part of a "
                      "log's name, such as router (default: all)")  # fmt: skip
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is written next, until Ctrl-C")
    logs.add_argument("-n", type=_count, default=20, dest="num_lines", metavar="N", help="last lines (default 20)")
    logs.add_argument("--port", type=int, default=PORT, help=f"its HTTP port (default {PORT})")
    logs.add_argument("--folder", type=Path, metavar="DIR", help="the logs' folder (default: the last of that port)")
    add("list", "list the models of this machine, in models/ and the hub's cache, and whether each can be served")
    pull = add("pull", "fetch a model of the Hugging Face hub if it can be served")
    pull.add_argument("model", metavar="MODEL", help="its hub id, owner/name")
    pull.add_argument("--revision", metavar="COMMIT", help="commit, branch or tag (default: the main branch)")
    doctor = add("doctor", "look at this machine and a settings file for what would keep Manta from starting")
    doctor.add_argument("--gpu", action="store_true", help="look at what a GPU needs; with one, compile for minutes")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    key = add("key", "make a random key, for clients or for the operator; list the keys of router.keys_file")
    key.add_argument("action", choices=["new", "list", "usage"], help="new: print a key, and on standard error where "
                     "it belongs; list: the keys of a running Manta, their limits and use; usage: what tenants have "
                     "used in each month, by the routers' logs")  # fmt: skip
    key.add_argument("--id", default="NAME", help="of the entry for router.keys_file that new prints beside the key")
    key.add_argument("--month", type=_month, metavar="YYYY-MM", help="usage: of this month alone")
    key.add_argument("--csv", action="store_true", help="usage: print CSV")
    key.add_argument("--port", type=int, default=PORT, help=f"usage: the HTTP port of whose logs (default {PORT})")
    key.add_argument("--folder", type=Path, metavar="DIR", help="usage: the logs' folder (default: the last of that "
                     "port)")  # fmt: skip
    key.add_argument("--url", default=URL, help=f"address of Manta (default {URL})")
    _add_key(key, KEY_VARIABLE)
    add("dashboards", "write Prometheus settings, rules and Grafana boards, or check them")
    add("settings", "print the table of all settings in Markdown (docs/settings.md)")
    serve.add_argument("--print-config", action="store_true", help="print the settings as a file, and start nothing")
    for command in (serve, run, check, doctor):
        _add_settings(command)
    _add_talk(run)
    return parser


def _add_clients(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands that ask a running Manta."""
    top = add("top", "watch replicas, KV pools and requests; press ? there for its keys")
    top.add_argument("--once", action="store_true", help="print one snapshot as plain text and exit")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="refresh interval in s (default 1)")
    explain = add("explain", "explain why a recent request went to its replica, and where its time went")
    explain.add_argument("rid", metavar="RID", help="its X-Request-Id, or the id of its answer")
    why = add("why", "say why prompts were not cached, and what that cost, by tenant")
    why.add_argument("--last", type=_duration, default=3600.0, dest="for_s", metavar="TIME", help="how long back, to "
                     "five minutes, at most 24h (default 1h)")  # fmt: skip
    kill = add("kill", "end the process of a replica at once: its requests go on elsewhere, and it is replaced")
    kill.add_argument("replica", metavar="REPLICA", help="its name or the number of it (1), its id or a part of that")
    kill.add_argument("--yes", action="store_true", help="do not ask first, as is done on a terminal")
    kill.add_argument("--wait", type=_duration, default=300.0, dest="for_s", metavar="TIME", help="for the replica "
                      "that takes its place (default 5m)")  # fmt: skip
    chat = add("chat", "talk to a served model, and see after each answer what was cached and how fast it was")
    _add_talk(chat)
    bench = add("bench", "put a load of chats on a running Manta; print latencies, throughput and what was cached")
    bench.add_argument("--for", type=_duration, default=60.0, dest="for_s", metavar="TIME", help="such as 90s or 5m "
                       "(default 60s); what then runs is waited for")  # fmt: skip
    bench.add_argument("--concurrency", type=_number, default=8, metavar="N", help="users who chat at once (default 8)")
    bench.add_argument("--max-tokens", type=_number, default=64, metavar="N", help="longest answer (default 64)")
    batch = add("batch", "list the batches of a key and how far they are, or end one")
    batch.add_argument("batch", nargs="?", metavar="ID", help="a batch (default: the last 100)")
    batch.add_argument("--cancel", action="store_true", help="end it: what is answered becomes its output")
    adapters = add("adapters", "list the adapters (LoRA) that requests may name and where they are loaded; give names")
    adapters.add_argument("action", nargs="?", choices=NAMED, default="list", help="list (default); load: give a name "
                          "to what a folder holds now; unload: forget a name")  # fmt: skip
    adapters.add_argument("names", nargs="*", metavar="NAME [FOLDER]", help="the name by which requests ask for it; "
                          "a folder below adapters.roots, absolute or relative to one")  # fmt: skip
    adapters.add_argument("--replace", action="store_true", help="load: the name may stand for something already")
    for command in (batch, bench):
        _add_key(command, API_KEY_VARIABLE)
    for command in (chat, bench):
        command.add_argument("--model", metavar="NAME", help="served model (default: the first one)")
    for command in (top, explain, why, kill, adapters):
        _add_key(command, KEY_VARIABLE)
    for command in (top, explain, why, kill, chat, bench, batch, adapters):
        command.add_argument("--url", default=URL, help=f"address of Manta (default {URL})")
    for command in (top, explain, why, batch, adapters):
        command.add_argument("--json", action="store_true", help="print JSON")


def _add_talk(command: argparse.ArgumentParser) -> None:
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default 512)")
    command.add_argument("--temperature", type=float, metavar="T", help="0: the same answer each time (default: "
                         "model's)")  # fmt: skip
    _add_key(command, API_KEY_VARIABLE)


def _add_key(command: argparse.ArgumentParser, variable: str) -> None:
    told = f"file that holds the key (default: {variable} in the environment)"
    command.add_argument("--key-file", type=_text_of, dest="key", metavar="FILE", help=told)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id, with the defaults "
                         f"of all settings; or a settings file ({', '.join(FILES)}; default {CONFIG})")  # fmt: skip
    command.add_argument("--model", "--model-path", metavar="MODEL", help="the same by vLLM's and SGLang's name")
    flags = command.add_argument_group("settings", "of the model, or in the place of the file's (docs/settings.md)")
    for flag in FLAGS:
        flags.add_argument(*flag.names, dest=flag.setting, metavar=flag.metavar, help=flag.told)
    flags.add_argument("--disaggregate", metavar="P:D", help="compute prompts in P replicas and hand them to D others")


def _settings_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Given:
    """Read which settings a command is about; ends the process where two things are said at once."""
    if None not in (args.config, args.model):
        parser.error(f"{args.config} and --model {args.model} are two things to serve: give one")
    source = next((given for given in (args.model, args.config) if given is not None), CONFIG)
    if not source:
        parser.error("an empty word names no model and no settings file")
    is_file = source.endswith(FILES) or (not source.endswith(".gguf") and Path(source).is_file())
    is_model = args.model is not None or not is_file
    try:
        changes = tuple(_changes(args))
    except ValueError as error:
        parser.error(str(error))
    return CommandLine(source, is_model, changes) if is_model or changes else source


def _changes(args: argparse.Namespace) -> Iterator[SettingChange]:
    """Read what the flags change. Raises: ValueError for a word that no setting can be."""
    for flag in FLAGS:
        if (word := getattr(args, flag.setting)) is not None:
            try:
                yield SettingChange(flag.setting, flag.read(word), f"{flag.name} {word}")
            except yaml.YAMLError:
                raise ValueError(f"{flag.name}: {word!r} is not a value of a setting") from None
    if (word := args.disaggregate) is not None:
        counts = word.split(":")
        if len(counts) != 2 or not all(map(str.isdecimal, counts)):
            raise ValueError(f"--disaggregate: must be two numbers of replicas such as 1:2, got {word!r}")
        yield SettingChange("mode", "disaggregated", f"--disaggregate {word}")
        for role, count in zip(("prefill", "decode"), counts, strict=True):
            yield SettingChange(f"{role}.count", int(count), f"--disaggregate {word}")


def _text_of(path: str) -> str:
    """Read a file. A key on the command line itself could be read by every user of the machine while it runs."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("must be 1 or more, got 0")
    return int(text)


def _duration(text: str) -> float:
    """Read 90, 90s, 5m or 1h, as seconds."""
    unit_s = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    number = text if unit_s is None else text[:-1]
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"must be a time such as 90s or 5m, got {text!r}")
    return float(int(number) * (unit_s or 1))


def _month(text: str) -> str:
    if not re.fullmatch("[0-9]{4}-(0[1-9]|1[0-2])", text):
        raise argparse.ArgumentTypeError(f"must be a month such as 2026-11, got {text!r}")
    return text


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 3600, got {text!r}")
    return value
