"""The command line of `manta`: its commands, their options, and help with an example for each.

Never:     imports anything large: `manta --help` answers at once.
"""

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deployments.settings.keys import KEY_VARIABLE
from deployments.settings.settings_file import LOOPBACK, PORT, OneModel

CONFIG = "serve_config.yaml"
URL = f"http://127.0.0.1:{PORT}"
API_KEY_VARIABLE = "MANTA_API_KEY"
PASSED_ON = ("bench", "dashboards")  # commands with command lines of their own
EXAMPLES = {
    "serve": "manta serve --model models/SmolLM2-135M-Instruct",
    "check": "manta check other.yaml",
    "top": "manta top --once",
    "explain": "manta explain chatcmpl-4f2a",
    "chat": "echo 'Name three colours.' | manta chat --max-tokens 32",
    "logs": "manta logs router --follow",
    "bench": "manta bench --rate 2 --num 4 shared-prefix",
    "dashboards": "manta dashboards export watch",
    "doctor": "manta doctor --json",
    "key": "manta key new",
    "settings": "manta settings > settings.md",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose message about an unknown command names the nearest one."""

    def error(self, message: str) -> NoReturn:
        _, _, given = message.partition("invalid choice: '")
        near = difflib.get_close_matches(given.partition("'")[0], EXAMPLES, n=1, cutoff=0.5)
        super().error(f"{message}; did you mean {near[0]!r}?" if given and near else message)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what follows a command of PASSED_ON is in ``rest``, unread."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in PASSED_ON and (given[0] == "dashboards" or not {"-h", "--help"} & {*given}):
        return argparse.Namespace(version=False, command=given[0], rest=given[1:])
    parser = _parser()
    args = parser.parse_args(given or ["--help"])
    if "model_path" in args:
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
    check = add("check", "check a settings file, list all errors, and start nothing")
    top = add("top", "watch replicas, KV pools and requests; press ? there for its keys")
    top.add_argument("--once", action="store_true", help="print one snapshot as plain text and exit")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="refresh interval in s (default 1)")
    explain = add("explain", "explain why a recent request went to its replica, and where its time went")
    explain.add_argument("rid", metavar="RID", help="its X-Request-Id, or the id of its answer")
    chat = add("chat", "talk to a served model, and see after each answer what was cached and how fast it was")
    chat.add_argument("--model", metavar="NAME", help="served model (default: the first one)")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default 512)")
    chat.add_argument("--temperature", type=float, metavar="T", help="0: the same answer each time (default: model's)")
    logs = add("logs", "print the logs of a Manta of this machine, which may have ended, and follow them")
    logs.add_argument("replica", nargs="?", default="", metavar="REPLICA", help="a replica's id, or another part of a "
                      "log's name, such as router (default: all)")  # fmt: skip
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what is written next, until Ctrl-C")
    logs.add_argument("-n", type=_count, default=20, dest="num_lines", metavar="N", help="last lines (default 20)")
    logs.add_argument("--port", type=int, default=PORT, help=f"its HTTP port (default {PORT})")
    logs.add_argument("--folder", type=Path, metavar="DIR", help="the logs' folder (default: the last of that port)")
    doctor = add("doctor", "look at this machine and a settings file for what would keep Manta from starting")
    doctor.add_argument("--gpu", action="store_true", help="look at what a GPU needs; with one, compile for minutes")
    key = add("key", "make a random key, for clients or for the operator")
    key.add_argument("action", choices=["new"], help="print a new key, and on standard error where it belongs")
    bench = add("bench", "put a short load on a running Manta and print latencies and throughput (from a checkout)")
    bench.add_argument("workload", nargs="*", help="random, shared-prefix, multi-turn (default: the first two, small); "
                       "`python -m benchmarks serving --help` has all options, which are passed on")  # fmt: skip
    add("dashboards", "write Prometheus settings, rules and Grafana boards, or check them")
    add("settings", "print the table of all settings in Markdown (docs/settings.md)")
    for command in (serve, check, doctor):
        command.add_argument("config", nargs="?", help=f"settings file (default {CONFIG})")
        command.add_argument("--model", dest="model_path", metavar="DIR", help="serve this folder, GGUF file or hub id "
                             "with the defaults of all settings, and without a file")  # fmt: skip
        command.add_argument("--host", help=f"with --model: listen here (default {LOOPBACK}; 0.0.0.0: everywhere)")
        command.add_argument("--port", type=int, help=f"with --model: listen at this port (default {PORT})")
    for command in (top, explain, chat, bench):
        command.add_argument("--url", default=URL, help=f"address of Manta (default {URL})")
    for command in (top, explain, doctor):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command, variable in ((top, KEY_VARIABLE), (explain, KEY_VARIABLE), (chat, API_KEY_VARIABLE)):
        told = f"file that holds the key (default: {variable} in the environment)"
        command.add_argument("--key-file", type=_text_of, dest="key", metavar="FILE", help=told)
    return parser


def _settings_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str | OneModel:
    """Read which settings a command is about; ends the process where two things are said at once."""
    address = {name: getattr(args, name) for name in ("host", "port") if getattr(args, name) is not None}
    if args.model_path is None:
        if address:
            parser.error("--host and --port go with --model; a settings file has them as http_options")
        return args.config or CONFIG
    if args.config is not None:
        parser.error(f"--model stands for a settings file, and {args.config} is one: name the model in it")
    return OneModel(args.model_path, **address)


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


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 3600, got {text!r}")
    return value
