"""``python -m deployments serve [CONFIG]`` and ``python -m deployments check [CONFIG]``."""

import argparse
import sys

from deployments.serve import read, run
from replicas.errors import InvalidConfig

DEFAULT = "serve_config.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (("serve", "serve until interrupted"), ("check", "check the settings and leave")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("config", nargs="?", default=DEFAULT, help=f"settings file ({DEFAULT})")
    args = parser.parse_args()
    if args.command == "serve":
        return run(args.config)
    try:
        read(args.config)
    except (OSError, ValueError, InvalidConfig) as error:
        print(f"{args.config} cannot be served:\n{error}", file=sys.stderr)
        return 2
    print(f"{args.config} is in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
