"""The `manta` command, also as ``python -m deployments``: serve, run, check, top, explain, why, kill, chat, logs, list,
pull, bench, batch, adapters, dashboards, doctor, key.

Never: imports what a command does not need: `manta top` starts without Ray and torch.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence

import yaml

from deployments.command import arguments
from deployments.places import ROOT, VERSION
from deployments.settings.settings_file import ALL_ADDRESSES, Given, SettingsFile, check_port, refuse, setting_of
from deployments.tenancy.keys import KEY_VARIABLE, KEYS_VARIABLE, digest, new_key
from replicas.errors import InvalidConfig

BROKEN_PIPE = 141  # as of a program that SIGPIPE ends


def main(words: Sequence[str] | None = None) -> int:
    try:
        try:
            return _run(arguments.parse(words))
        finally:
            if sys.stdout is not None:  # closed by whoever started us
                sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        return BROKEN_PIPE
    except KeyboardInterrupt:  # while the modules are imported; afterwards cluster.py has its own
        print("stopped", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    if args.version:
        print(_versions())
        return 0
    match args.command:
        case "top" | "explain" | "why" | "kill" | "chat" | "bench" | "batch" | "adapters":
            return _ask(args)
        case "run":
            return _own(args)
        case "logs":
            from deployments.command import log_files

            folder = args.folder or log_files.link_of(args.port)
            return log_files.run(folder, args.replica, num_lines=args.num_lines, follow=args.follow)
        case "list":
            from deployments.command import models

            return models.show()
        case "pull":
            from deployments.command import models

            return models.pull(args.model, args.revision)
        case "doctor":
            from deployments.command import doctor

            if args.gpu:
                from deployments.command import doctor_gpu

                return doctor.report(list(doctor_gpu.examine()), as_json=args.json)
            return doctor.report(list(doctor.examine(args.config)), as_json=args.json)
        case "key" if args.action == "list":
            return _ask(args)
        case "key" if args.action == "usage":
            from deployments.command import log_files, usage

            return usage.run(args.folder or log_files.link_of(args.port), month=args.month, as_csv=args.csv)
        case "key":
            key = new_key()
            print(key)
            where = f"for clients: a line of router.api_key_file, or {KEYS_VARIABLE}; for the operator: {KEY_VARIABLE}"
            entry = f"- {{id: {args.id}, sha256: {digest(key).hex()}}}"
            print(f"{where}\nor of a tenant, in router.keys_file: {entry}", file=sys.stderr)
            return 0
        case "settings":
            from deployments.command import settings_doc

            return settings_doc.main()
        case "dashboards":
            from dashboards import __main__ as dashboards

            return dashboards.main(args.rest)
        case "serve" if args.print_config:
            return _print(args.config)
    return _serve_or_check(args.command, args.config)


def _ask(args: argparse.Namespace) -> int:
    """Run a command that asks a running Manta."""
    admin_key = args.key or os.environ.get(KEY_VARIABLE)
    match args.command:
        case "top":
            from deployments.watch.terminal import top

            options = top.Options(once=args.once, as_json=args.json, interval_s=args.interval)
            return top.run(args.url, admin_key, options)
        case "explain":
            from deployments.watch.terminal import explain

            return explain.run(args.url, args.rid, admin_key, as_json=args.json)
        case "kill":
            from deployments.watch.terminal import kill

            return kill.run(args.url, args.replica, admin_key, sure=args.yes, for_s=args.for_s)
        case "key" | "batch" | "adapters" | "why":
            return _list(args, admin_key)
        case "bench":
            from deployments.watch.terminal import bench, chat

            asked = chat.ChatOptions(model=args.model, system=None, max_tokens=args.max_tokens, temperature=None)
            return bench.run(args.url, _client_key(args), asked, users=args.concurrency, for_s=args.for_s)
    return _chat(args, args.url, args.model)


def _list(args: argparse.Namespace, admin_key: str | None) -> int:
    """Run a command that shows what Manta lists. Return the exit status: 0, or why Manta did not answer (ask.py)."""
    from deployments.watch.terminal import ask, lists

    try:
        match args.command:
            case "key":
                lists.keys(args.url, admin_key)
            case "batch":
                cancel = args.cancel and args.batch is not None
                lists.batches(args.url, args.batch, _client_key(args), cancel=cancel, as_json=args.json)
            case "why":
                lists.uncached(args.url, args.for_s, admin_key, as_json=args.json)
            case "adapters":
                lists.adapters(args.url, admin_key, args.action, *args.names, replace=args.replace, as_json=args.json)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def _print(config: Given) -> int:
    """Print the settings as a file."""
    from deployments.settings import settings_file

    try:
        print(yaml.safe_dump(settings_file.read(config).content, sort_keys=False), end="")
    except InvalidConfig as error:
        return refuse(config, error)
    return 0


def _serve_or_check(command: str, config: Given) -> int:
    try:
        importlib.import_module("replicas.kernels")  # holds what is imported from here on to MANTA_CPU
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    from deployments.command import haproxy
    from deployments.settings import settings_file

    if not os.environ.get("RAY_ADDRESS"):
        os.environ.pop("RAY_ADDRESS", None)  # empty: there is none, as Ray reads it
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: applications beside a settings file are found
    try:  # before Ray and torch are imported, which takes seconds
        file = settings_file.read(config)
        host = _host(file, to_listen=command == "serve")
    except InvalidConfig as error:
        return refuse(config, error)
    haproxy.prepare_ray(host=host)
    if command == "serve":
        try:
            with haproxy.prepared(os.environ, host=host, warn=_warn, routes=file.routes):
                from deployments.command import serve

                status = serve.run(config)
        except InvalidConfig as error:
            return refuse(config, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # at Python's own end Ray would ask processes that have ended, which takes long
    from deployments.command import serve

    return serve.check(config)


def _chat(args: argparse.Namespace, url: str, model: str | None) -> int:
    from deployments.watch.terminal import chat

    asked = chat.ChatOptions(model=model, system=args.system, max_tokens=args.max_tokens, temperature=args.temperature)
    return chat.run(url, _client_key(args), os.environ.get(KEY_VARIABLE), asked)


def _client_key(args: argparse.Namespace) -> str | None:
    return args.key or os.environ.get(arguments.API_KEY_VARIABLE) or os.environ.get(KEY_VARIABLE)


def _own(args: argparse.Namespace) -> int:
    """Serve what the command line says, and chat with it."""
    from deployments.watch.terminal import ask, chat

    words = [args.config] if isinstance(args.config, str) else args.config.words
    for number in (signal.SIGTERM, signal.SIGHUP):  # else a closed terminal would leave what is served behind
        signal.signal(number, signal.default_int_handler)
    try:
        with chat.serving([sys.executable, "-m", "deployments", "serve", *words]) as url:
            return _chat(args, url, None)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status


def _versions() -> str:
    found = []
    for name in ("ray", "torch", "transformers"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return f"manta {VERSION} ({', '.join([*found, f'Python {platform.python_version()}'])}) in {ROOT}"


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
            line = file.line(*setting_of(str(error)).split("."))
            raise InvalidConfig(f"{file.place(line, str(error))}: {error}") from error
    return host


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
