"""Which files of ours a chat request runs through, and which a hand-off adds: counted while both run in this process.

    python -m tests.way     one line of JSON: {"chat": [files, by their first call], "hand_off": [those it adds]}

Everything is real but Ray. A file counts when a function of it is called between the request's first byte and its last;
a second request is measured, so that what is only made once does not count.
"""

import asyncio
import json
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ROOT = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
HOUSES = ("deployments", "routing", "replicas", "kvtransfer", "dashboards")
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

    from deployments.http.http_app import make_app
    from deployments.replica.served_engine import ServedEngine
    from kvtransfer.types import TransferSettings
    from replicas.config import CacheConfig
    from replicas.engine.loop import EngineLoop
    from replicas.launch import load_engine
    from routing.types import Role
    from tests.embedded import MODEL
    from tests.unit.deployments.in_process import House

    transfer = TransferSettings(host="127.0.0.1", token=b"a token of this test")

    def started(transfer: TransferSettings | None) -> EngineLoop:
        cache = CacheConfig(max_total_tokens=4_000)
        loop = EngineLoop(load_engine(MODEL, cache=cache, num_threads=1, record_events=True, transfer=transfer))
        loop.start()
        return loop

    async def way(replicas: dict[Role, EngineLoop]) -> list[str]:
        house = House(policy="estimated_ttft", always_hand_off=len(replicas) > 1)
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
            await _chat(client, "Hello." + PROMPT)
            with calls.counted() as files:
                await _chat(client, PROMPT)
                await asyncio.sleep(0.5)  # its pages become the tree's, and the router hears of them
        await house.stop()
        for loop in replicas.values():
            loop.stop()
        return files

    async def _chat(client: httpx.AsyncClient, text: str) -> None:
        body = {
            "model": MODEL.rsplit("/", 1)[-1], "messages": [{"role": "user", "content": text}],
            "max_tokens": 20, "temperature": 0.7, "seed": 1, "stream": True,
        }  # fmt: skip
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    chat = await way({Role.UNIFIED: started(None)})
    apart = await way({Role.PREFILL: started(transfer), Role.DECODE: started(transfer)})
    return {"chat": chat, "hand_off": [file for file in apart if file not in chat]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ways(Calls()))))
