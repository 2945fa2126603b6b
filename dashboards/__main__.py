"""Write the generated files, export them for Prometheus and Grafana, check what they return.

    build         boards, rules and the page of the runbook      docs     docs/metrics.md, from the catalogue
    export DIR    settings, rules and boards for your servers   check    ask a Prometheus every query
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from dashboards import docs, files
from dashboards.check import problems, prometheus, survey, table


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="write boards, rules and the runbook's page anew")
    commands.add_parser("docs", help="write docs/metrics.md anew")
    _add_export(commands.add_parser("export", help="write settings, rules and boards into a folder"))
    _add_check(commands.add_parser("check", help="ask a Prometheus every query of boards and rules"))
    args = parser.parse_args(words)
    if args.command == "check":
        return _check(args)
    if args.command == "export":
        settings = {each.name: getattr(args, each.name) for each in fields(files.Export)}
        files.export(args.folder, files.Export(**settings))
        print(f"{args.folder}: read its README.md")
        return 0
    built = files.board_texts() | files.page_texts()
    changed = files.write(built if args.command == "build" else {files.METRICS_DOC: docs.markdown()})
    print("\n".join(f"wrote {path}" for path in changed) or "nothing to write: all files are as the catalogue says")
    return 0


def _add_export(parser: argparse.ArgumentParser) -> None:
    default = files.Export()
    parser.add_argument("folder", type=Path, help="where to write; made if it does not exist")
    parser.add_argument("--url", default=default.url, help="address of the observatory (default: %(default)s)")
    live_url = "where people open it, where that is another: boards and alerts lead there"
    parser.add_argument("--live-url", default="", help=live_url)
    parser.add_argument("--key-file", type=Path, help="file with the admin key, where one is configured")
    found = "where Grafana finds Prometheus (default: %(default)s)"
    parser.add_argument("--prometheus", default=default.prometheus, help=found)
    parser.add_argument("--grafana", default="", help="where people open Grafana; alerts then lead to its boards")
    interval = "seconds between scrapes (default: %(default)g)"
    parser.add_argument("--interval", type=float, default=default.interval_s, dest="interval_s", help=interval)
    traces_url = "address of a trace, with ${__value.raw} for its id: where the boards' exemplars lead"
    parser.add_argument("--traces-url", default="", help=traces_url)
    docs_url = "put before docs/runbook.md in alerts, with its last slash; without it alerts lead to the live view"
    parser.add_argument("--docs-url", default="", help=docs_url)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prometheus", metavar="URL", required=True, help="its address; send traffic meanwhile")
    parser.add_argument("--disaggregated", action="store_true", help="prefill and decode are apart: their panels too")
    parser.add_argument("--autoscaled", action="store_true", help="an autoscaler runs: its panels too")
    parser.add_argument("--window", default="1m", help="for Grafana's $__rate_interval (default: %(default)s)")


def _check(args: argparse.Namespace) -> int:
    results = survey(prometheus(args.prometheus), window=args.window)
    print(table(results))
    found = problems(results, args.disaggregated, args.autoscaled)
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
