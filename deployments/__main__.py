"""``python -m deployments COMMAND``: serve, check, settings; and for a Manta that runs, top, explain."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from deployments.command import haproxy
from deployments.settings import settings_file
from deployments.settings.settings_file import ALL_ADDRESSES, SettingsFile, check_port
from replicas.errors import InvalidConfig

DEFAULT = "serve_config.yaml"
URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "MANTA_ADMIN_KEY"  # as keys.py has it, which top and explain do without


def main() -> int:
    args = _parser().parse_args()
    try:
        return _run(args)
    except KeyboardInterrupt:  # while the modules are imported; afterwards cluster.py has its own
        print("stopped", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.command == "top":
        from deployments.watch.terminal import top

        options = top.Options(once=args.once, as_json=args.json, interval_s=args.interval)
        return top.run(args.url, args.key or os.environ.get(KEY_VARIABLE), options)
    if args.command == "explain":
        from deployments.watch.terminal import explain

        return explain.run(args.url, args.rid, args.key or os.environ.get(KEY_VARIABLE), as_json=args.json)
    if args.command == "settings":
        from deployments.command import settings_doc

        return settings_doc.main()
    try:
        importlib.import_module("replicas.kernels")  # holds what is imported from here on to MANTA_CPU
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:  # before Ray and torch are imported, which takes seconds
        host = _host(settings_file.read(args.config), to_listen=args.command == "serve")
    except InvalidConfig as error:
        print(f"{args.config} cannot be served:", *error.problems, sep="\n  ", file=sys.stderr)
        return 2
    haproxy.prepare_ray(host=host)
    if args.command == "serve":
        with haproxy.prepared(os.environ, host=host, warn=_warn):
            from deployments.command import cluster, serve

            status = serve.run(args.config)
        if status == cluster.AT_ONCE:
            sys.stderr.flush()
            os._exit(status)  # Ray's own end would ask processes that were killed
        return status
    from deployments.command import serve

    return serve.check(args.config)


def _host(file: SettingsFile, *, to_listen: bool) -> str:
    """What clients connect to. Raises: InvalidConfig when the port is taken, if we are ``to_listen`` there."""
    try:
        host, port = file.address
    except InvalidConfig:
        return ALL_ADDRESSES  # it is said with all else that is wrong
    if to_listen:
        try:
            check_port(host, port)
        except InvalidConfig as error:
            raise InvalidConfig(f"{file.path}:{file.line('http_options', 'port')}: {error}") from error
    return host


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (("serve", "serve until interrupted"), ("check", "check the settings and exit")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("config", nargs="?", default=DEFAULT, help=f"settings file (default {DEFAULT})")
    top = commands.add_parser("top", help="a live table of replicas, pools and rates")
    top.add_argument("--once", action="store_true", help="print once and exit")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="refresh interval in s (default 1)")
    commands.add_parser("settings", help="print the table of all settings (docs/settings.md)")
    explain = commands.add_parser("explain", help="why a recent request went where it went, and where its time went")
    explain.add_argument("rid", metavar="RID", help="its X-Request-Id, or the id of its answer")
    for command in (top, explain):
        command.add_argument("--url", default=URL, help=f"address of Manta (default {URL})")
        command.add_argument("--json", action="store_true", help="print raw JSON")
        help_text = f"file that holds the admin key (default: {KEY_VARIABLE} in the environment)"
        command.add_argument("--key-file", type=_text_of, dest="key", metavar="FILE", help=help_text)
    return parser


def _text_of(path: str) -> str:
    """Read a file. A key on the command line itself could be read by every user of the machine while it runs."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be between 0.1 and 3600 s, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
