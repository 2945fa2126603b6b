"""`python -m benchmarks`: what can be measured. `python -m benchmarks NAME --help` says how."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "engine": "one engine without HTTP: decode, prefill, formats of weights",
    "kernels": "the CPU kernels as shares of the machine's limits",
    "chaos": "faults under streams: what becomes of each, how soon all is well again, what is left",
    "soak": "more load than is carried, for an hour, with kills: what grows, what is lost",
    "serving": "what clients of a server see: workloads, a sweep of load, overload, a recorded day",
    "router": "the production router: policies over simulated replicas, and live",
    "peers": "Manta, vLLM, Transformers and llama.cpp on one machine in one run",
    "gpu": "decode and prefill on a GPU as shares of its measured limits",
}


def main(argv: Sequence[str] | None = None) -> int | None:
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    if name not in COMMANDS:
        lines = [f"  {each:<10} {about}" for each, about in COMMANDS.items()]
        print("usage: python -m benchmarks NAME [option ...]", *lines, sep="\n")
        print("and, to hold two commits against each other: python -m benchmarks.token_ids --help")
        return 0 if name in ("", "-h", "--help") else 2
    try:
        importlib.import_module("replicas.kernels")  # holds what is imported from here on to MANTA_CPU
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    module = "__main__" if name in ("peers", "gpu") else ""
    command = importlib.import_module(f"benchmarks.{name}{'.' * bool(module)}{module}")
    status: int | None = command.main(rest[:-1])
    return status


if __name__ == "__main__":
    sys.exit(main())
