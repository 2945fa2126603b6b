"""``python -m dashboards``: write the generated files, export them for Prometheus and Grafana, check them.

    build         boards and rules anew from the catalogue      docs     docs/metrics.md
    export DIR    settings, rules and boards for your servers   check    names, syntax; with --prometheus also data
"""

import argparse
import sys
from pathlib import Path

import yaml

from dashboards import generated
from dashboards.check import prometheus, survey, table
from dashboards.export import Export, export


def main(words: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write boards and rules anew (needs the extra `boards`)")
    commands.add_parser("docs", help="write docs/metrics.md anew")
    _add_export(commands.add_parser("export", help="write settings, rules and boards into a folder"))
    _add_check(commands.add_parser("check", help="check boards and rules (needs the extra `test`)"))
    args = parser.parse_args(words)
    try:
        return _run(args)
    except ModuleNotFoundError as error:
        extra = {"build": "boards", "check": "test"}.get(args.command)
        if extra is None:
            raise
        print(f"{args.command} needs {error.name}: pip install 'manta[{extra}]'", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.command == "build":
        return _said(generated.write({**generated.board_texts(), generated.RULES: generated.rules_text()}))
    if args.command == "docs":
        return _said(generated.write({generated.METRICS_DOC: generated.docs_text()}))
    if args.command == "export":
        settings = Export(url=args.url, key_file=args.key_file, prometheus=args.prometheus, docs_url=args.docs_url)
        export(args.folder, settings)
        print(f"{args.folder}: read its README.md")
        return 0
    return _check(args)


def _add_export(parser: argparse.ArgumentParser) -> None:
    default = Export()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default=default.url, help="of the observatory (default: %(default)s)")
    parser.add_argument("--key-file", type=Path, help="file with the admin key, where one is configured")
    parser.add_argument("--prometheus", default=default.prometheus, help="where Grafana finds it (%(default)s)")
    parser.add_argument("--docs-url", default="", help="put before docs/runbook.md in alerts, with its last slash")


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prometheus", metavar="URL", help="ask it every query, expect data; send traffic meanwhile")
    parser.add_argument("--disaggregated", action="store_true", help="prefill and decode are apart: their panels too")
    parser.add_argument("--autoscaled", action="store_true", help="an autoscaler runs: its panels too")
    parser.add_argument("--window", default="1m", help="for Grafana's $__rate_interval (default: %(default)s)")


def _check(args: argparse.Namespace) -> int:
    from dashboards.lint import Known, check_board, check_rules  # promql_parser: not part of a plain installation

    known = Known.of_catalog()
    found = check_rules(yaml.safe_load(generated.RULES.read_text()), known)
    for uid in generated.BOARD_FILES:
        found += check_board(generated.committed_board(uid), known)
    problems = [str(problem) for problem in found]
    if args.prometheus:
        asked = survey(prometheus(args.prometheus), window=args.window)
        print(table(asked))
        answers = (each.problem(disaggregated=args.disaggregated, autoscaled=args.autoscaled) for each in asked)
        problems += [answer for answer in answers if answer]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


def _said(changed: list[Path]) -> int:
    for path in changed:
        print(f"wrote {path}")
    if not changed:
        print("nothing to write: all files are as the catalogue says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
