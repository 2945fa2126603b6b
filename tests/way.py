"""Which files of ours run for a chat, for one with tools and a schema, for a transfer and for a page that goes through
the tiers: counted while each runs in this process.

    python -m tests.way         one line of JSON: the files of each by their first call; of the last two, what they add
                                to a chat's. And what docs/way.md says else, with exit status 1
    python -m tests.way write   and docs/way.md anew: each file with the first sentence of its docstring

Everything is real but Ray. A file counts when a function of it is called between the request's first byte and its last;
a second request is measured, so that what is only made once does not count.
"""

import ast
import asyncio
import json
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

ROOT = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
PAGE = pathlib.Path(ROOT) / "docs" / "way.md"
HOUSES = ("deployments", "routing", "replicas", "kvtransfer", "dashboards")
WALKS = {  # of docs/way.md: their titles, and what stands below
    "tools": (
        "A chat with tools and a schema",
        "A streamed chat with a tool, `tool_choice: auto`, and a JSON schema for the answer.",
    ),
    "kv_transfer": (
        "A KV transfer", "What a prompt computed at one replica and answered at another runs besides.",
    ),
    "page": (
        "A page to the host, to a store and back",
        "A prompt is computed. Its pages leave the device's pool for the host and the store. The prompt is asked for "
        "again, and its pages come from the host; all tiers are emptied, and they come from the store. What an engine "
        "with both tiers runs besides.",
    ),
}  # fmt: skip
HEAD = """# The files on a request's way

For those who read the code. Each row is a file of which a function runs, in the order of the first calls, with the
first sentence of the file. Threads take turns, so neighbours may change places. What is done once, at the start or for
the first request, has no row. `python -m tests.way write` runs all three requests in one process, everything real but
Ray, and writes this page; a test fails when a row is missing or does not run.
"""
SCHEMA = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
PROMPT = "Tell the story of a house with many rooms, in which each thing has one place, and say who lives there."


class Calls:
    """The files of the functions that any thread calls while `counted`, in the order of their first call."""

    def __init__(self) -> None:
        self._on = False
        self._files: dict[str, None] = {}
        threading.setprofile(self._called)  # of threads that start from now on
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            file = frame.f_code.co_filename[len(ROOT) :].replace(os.sep, "/")
            if file.split("/")[0] in HOUSES and not file.endswith("__init__.py"):
                self._files.setdefault(file)

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        self._files.clear()
        files: list[str] = []
        self._on = True
        yield files
        self._on = False
        files += self._files


async def ways(calls: Calls) -> dict[str, list[str]]:
    import httpx  # here, and what of ours is below: the profiler is set before any thread of theirs starts
    import numpy as np

    from deployments.http.http_app import make_app
    from deployments.replica.served_engine import ServedEngine
    from kvtransfer.types import TransferSettings
    from replicas.config import CacheConfig
    from replicas.engine.engine import Engine
    from replicas.engine.loop import EngineLoop
    from replicas.launch import EngineSettings, load_engine
    from replicas.types import GenerateRequest, SamplingParams
    from routing.types import Role
    from tests.embedded import MODEL, short_model
    from tests.unit.deployments.in_process import House

    transfer = TransferSettings(host="127.0.0.1", token=b"a token of this test")
    own = EngineSettings(model=short_model(), num_threads=1)
    tools: dict[str, object] = {
        "tools": [{"type": "function", "function": {"name": "move", "parameters": SCHEMA}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "room", "schema": SCHEMA}},
    }

    def started(transfer: TransferSettings | None) -> EngineLoop:
        cache = CacheConfig(max_total_tokens=4_000)
        loop = EngineLoop(
            load_engine(replace(own, cache=cache, record_events=True, transfer=transfer))
        )
        loop.start()
        return loop

    async def way(replicas: dict[Role, EngineLoop], *asked: dict[str, object]) -> list[list[str]]:
        found: list[list[str]] = []
        house = House(policy="estimated_ttft", always_kv_transfer=len(replicas) > 1)
        await house.start()
        for role, loop in replicas.items():
            house.add(ServedEngine(loop, replica_id=role.value, node_id="here", role=role))
        assert await house.fleet.wait_ready(30)
        while len(house.router.views) < len(replicas):
            await asyncio.sleep(0.01)
        app = make_app(house.service(next(iter(replicas.values())).engine.tokenizer))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://manta", timeout=60
        ) as client:
            for more in asked:
                await _chat(client, "Hello." + PROMPT, more)
                with calls.counted() as files:
                    await _chat(client, PROMPT, more)
                    await asyncio.sleep(0.5)  # its pages become the tree's, and the router hears of them
                found.append(files)
        await house.stop()
        for loop in replicas.values():
            loop.stop()
        return found

    async def _chat(client: httpx.AsyncClient, text: str, more: dict[str, object]) -> None:
        body = {
            "model": MODEL.rsplit("/", 1)[-1], "messages": [{"role": "user", "content": text}],
            "max_tokens": 20, "temperature": 0.7, "seed": 1, "stream": True, **more,
        }  # fmt: skip
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    def page(engine: Engine) -> list[str]:
        """Compute a prompt; push its pages to the host, from where they are stored; take them back from each."""
        ids = np.arange(1000, 1200, dtype=np.int32)

        def ask(ids: np.ndarray) -> None:
            engine.submit(GenerateRequest(rid=f"of {ids[0]}", token_ids=ids, sampling=SamplingParams(max_new_tokens=1)))
            until(lambda: not engine.has_work)

        def until(done: Callable[[], bool]) -> None:
            deadline_s = time.monotonic() + 60
            while not done():
                assert time.monotonic() < deadline_s
                if not engine.step():
                    engine.poll()
                    time.sleep(0.001)

        def go() -> None:
            ask(ids)
            stored = engine.stats().tiers.store_items
            engine.kv.store.make_room(engine.kv.store.num_pages, "this test")
            until(lambda: engine.stats().tiers.store_items >= stored + len(ids) // 16 - 1)
            ask(ids)
            engine.flush_cache()
            ask(ids)
            tiers = engine.stats().tiers
            assert tiers is not None
            assert min(tiers.host_hit_tokens, tiers.store_hit_tokens) > 0, tiers

        go()
        ids += 500
        with calls.counted() as files:
            go()
        engine.close()
        return files

    chat, with_tools = await way({Role.UNIFIED: started(None)}, {}, tools)
    (apart,) = await way({Role.PREFILL: started(transfer), Role.DECODE: started(transfer)}, {})
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheConfig(
            max_total_tokens=4_000, host_memory_bytes=1 << 28, store=f"file://{folder}", write_policy="write_back",
            prefetch="wait_complete",  # this model computes sooner than a busy disk answers
        )  # fmt: skip
        paged = page(load_engine(replace(own, cache=cache, commit_pool=True)))
    beside = {"kv_transfer": apart, "page": paged}
    more = {name: [file for file in files if file not in chat] for name, files in beside.items()}
    return {"chat": chat, "tools": with_tools, **more}


def row(file: str) -> str:
    """Return the row of a file: its name and the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((pathlib.Path(ROOT) / file).read_text())) or ""
    first = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
    return f"| `{file}` | {first.replace('|', chr(92) + '|')} |"


def page_of(found: Mapping[str, Sequence[str]]) -> str:
    """Write docs/way.md."""
    walks = (
        "\n".join([f"\n## {title}\n\n{below}\n\n| file | what it is |\n|---|---|", *map(row, found[way])])
        for way, (title, below) in WALKS.items()
    )
    return HEAD + "\n".join(walks) + "\n"


def wrong(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what docs/way.md says else than ``found``, whatever the order."""
    parts = {each.partition("\n")[0]: each for each in PAGE.read_text().split("\n## ")}
    rows = {way: re.findall(r"^\| `.+\.py` .+$", parts[title], re.M) for way, (title, _) in WALKS.items()}
    return [
        f"{WALKS[way][0]}: {each} {what}"
        for way, said in rows.items()
        for what, those in (
            ("does not run, or is told otherwise by its file", set(said) - set(map(row, found[way]))),
            ("has no row", set(map(row, found[way])) - set(said)),
            ("has two rows", {each for each in said if said.count(each) > 1}),
        )
        for each in sorted(those)
    ]


if __name__ == "__main__":
    found = asyncio.run(ways(Calls()))
    if sys.argv[1:] == ["write"]:
        PAGE.write_text(page_of(found))
    print(json.dumps(found))
    print("\n".join(differing := wrong(found)), file=sys.stderr)
    sys.exit(bool(differing))
