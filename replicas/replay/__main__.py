"""Snapshots from the command line: take one in the middle of an answer, look into it, go on with it.

    python -m replicas.replay take FILE --model DIR --text "Once upon a time" --after 8
    python -m replicas.replay show FILE
    python -m replicas.replay run FILE --model DIR [--page-size 16] [--tp 1]

A file of a running Manta, from ``POST /snapshot_request``, is shown and run likewise.

Owns:  nothing; an engine of its own in this process, for one request.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from kvtransfer.errors import TransferError
from kvtransfer.replay.snapshot import ReplaySnapshot
from replicas.config import CacheConfig, ParallelConfig
from replicas.engine.engine import Engine
from replicas.errors import MantaError
from replicas.replay.replay import extract, restore
from replicas.types import GenerateRequest, SamplingParams, TokenDelta

HEAD = 16  # ids and slots shown


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        match args.command:
            case "show":
                said = describe(ReplaySnapshot.load(args.file))
            case "take":
                said = _take(args)
            case _:
                said = _run(args)
    except (TransferError, MantaError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(said, ensure_ascii=False))
    return 0


def describe(snapshot: ReplaySnapshot) -> dict[str, Any]:
    """Describe what a snapshot holds, without the bytes."""
    meta = snapshot.meta
    return {
        "rid": snapshot.rid,
        "model": meta.layout.model,
        "prompt_len": len(snapshot.prompt_ids),
        "num_output": len(snapshot.output_ids),
        "num_computed": meta.num_tokens,
        "cached_prefix_len": meta.cached_prefix_len,
        "prompt_ids": snapshot.prompt_ids[:HEAD].tolist(),
        "output_ids": snapshot.output_ids.tolist(),
        "cached": dict(snapshot.cached),
        "device": snapshot.device,
        "sampling": dict(snapshot.sampling),
        "kv": {"shape": list(snapshot.kv.shape), "bytes": snapshot.kv.nbytes, "dtype": meta.layout.dtype},
        "req_to_token": {"row": meta.row, "page_size": meta.layout.page_size, "slots": meta.slots[:HEAD].tolist()},
    }


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m replicas.replay", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what a snapshot holds")
    take = commands.add_parser("take", help="answer a text, and take a snapshot on the way")
    run = commands.add_parser("run", help="go on with a snapshot until its answer is complete")
    for command in (show, take, run):
        command.add_argument("file")
    for command in (take, run):
        command.add_argument("--model", required=True, help="folder or hub id")
        command.add_argument("--page-size", type=int, default=CacheConfig().page_size)
        command.add_argument("--tp", type=int, default=1)
        command.add_argument("--threads", type=int, default=None, help="compute threads of each rank")
        command.add_argument("--context-len", type=int, default=None)
    take.add_argument("--text", required=True, help="the prompt")
    take.add_argument("--after", type=int, default=8, help="output tokens before the snapshot")
    take.add_argument("--max-new-tokens", type=int, default=64)
    take.add_argument("--temperature", type=float, default=0.0)
    take.add_argument("--seed", type=int, default=0)
    return parser


def _engine(args: argparse.Namespace) -> Engine:
    from replicas.launch import EngineSettings, load_engine  # seconds of imports, which `show` does without

    return load_engine(
        EngineSettings(
            model=args.model,
            cache=CacheConfig(page_size=args.page_size),
            parallel=ParallelConfig(tp=args.tp),
            num_threads=args.threads,
            context_len=args.context_len,
        )
    )


def _take(args: argparse.Namespace) -> dict[str, Any]:
    engine = _engine(args)
    try:
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
        request = GenerateRequest(rid="replay", token_ids=engine.tokenizer.encode(args.text), sampling=sampling)
        deltas = engine.submit(request)
        taken = False
        while engine.has_work:
            req = engine.find("replay")
            if not taken and req is not None and req.num_output >= args.after:
                extract(engine, "replay").save(args.file)
                taken = True
            deltas += engine.step()
    finally:
        engine.close()
    return {"snapshot": args.file if taken else None, **_answer(deltas)}


def _run(args: argparse.Namespace) -> dict[str, Any]:
    snapshot = ReplaySnapshot.load(args.file)
    engine = _engine(args)
    try:
        deltas = restore(engine, snapshot)
        while engine.has_work:
            deltas += engine.step()
    finally:
        engine.close()
    return {"continued_after": len(snapshot.output_ids), **_answer(deltas)}


def _answer(deltas: Sequence[TokenDelta]) -> dict[str, Any]:
    finish = deltas[-1].finish if deltas else None
    return {
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "finish_reason": finish.reason.value if finish is not None else None,
    }


if __name__ == "__main__":
    sys.exit(main())
