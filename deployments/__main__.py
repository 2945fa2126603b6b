"""``python -m deployments serve [CONFIG]`` and ``python -m deployments check [CONFIG]``."""

import argparse
import sys

from deployments import ray_env

DEFAULT = "serve_config.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (("serve", "serve until interrupted"), ("check", "check the settings and leave")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("config", nargs="?", default=DEFAULT, help=f"settings file ({DEFAULT})")
    args = parser.parse_args()
    ray_env.prepare()
    from deployments import serve  # imports Ray, which reads the environment

    return serve.run(args.config) if args.command == "serve" else serve.check(args.config)


if __name__ == "__main__":
    sys.exit(main())
