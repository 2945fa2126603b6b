"""A batch over real Ray, asked for by OpenAI's SDK: two routers, two replicas, and kill -9 of those that work on it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from deployments.batches.store import BatchStore
from tests.embedded import short_model
from tests.serve.running import Running

pytestmark = [pytest.mark.serve, pytest.mark.model]
NAME = Path(short_model()).name
CHAT = "/v1/chat/completions"
NUM_LINES = 120


def lines() -> list[dict[str, Any]]:
    places = ["a river", "a mountain", "a town"]
    asked = [f"Write a sentence about {places[n % 3]}, and in it the number {n}." for n in range(NUM_LINES)]
    return [
        {
            "custom_id": f"line {n}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": NAME,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 16,
                "temperature": 0,
            },
        }
        for n, text in enumerate(asked)
    ]


def in_file(each: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


def begun(sdk: openai.OpenAI, content: bytes) -> openai.types.Batch:
    file = sdk.files.create(file=("lines.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def answers(sdk: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()]


def test_kills_of_the_router_and_of_a_replica_lose_and_double_no_line(app: Running, folder: Path) -> None:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=5, timeout=60) as sdk:
        calm = ended(app, sdk, begun(sdk, in_file(lines())))
        assert (calm.status, calm.error_file_id) == ("completed", None)
        wanted = answers(sdk, calm.output_file_id)
        assert [each["custom_id"] for each in wanted] == [line["custom_id"] for line in lines()]
        batch = begun(sdk, in_file([*lines(), {"custom_id": "wrong"}]))
        store = BatchStore(folder / "batches", max_bytes=1 << 30)
        for kill in (replica_pid, router_pid):
            before = counted(sdk, batch.id)
            app.until(lambda: counted(sdk, batch.id) > before + 10, 120)  # noqa: B023 (it is called here)
            os.kill(kill(app, store), signal.SIGKILL)
        done = ended(app, sdk, sdk.batches.retrieve(batch.id))
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": NUM_LINES + 1, "completed": NUM_LINES, "failed": 1}
        told = answers(sdk, done.output_file_id)
        assert [(each["custom_id"], text_of(each)) for each in told] == [
            (each["custom_id"], text_of(each)) for each in wanted
        ]
        assert [each["custom_id"] for each in answers(sdk, done.error_file_id)] == ["wrong"]
        page = sdk.batches.list(limit=1)
        assert [each.id for each in page] == [batch.id, calm.id]
    app.until(lambda: app.serves_with(2) and app.idle(), 120)


def ended(app: Running, sdk: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    found = batch

    def is_over() -> bool:
        nonlocal found
        found = sdk.batches.retrieve(batch.id)
        return found.status in ("completed", "failed", "expired", "cancelled")

    app.until(is_over, 240, 0.2)
    return found


def counted(sdk: openai.OpenAI, batch_id: str) -> int:
    counts = sdk.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def text_of(entry: dict[str, Any]) -> str:
    return str(entry["response"]["body"]["choices"][0]["message"]["content"])


def router_pid(app: Running, store: BatchStore) -> int:
    """The process of the router that runs the batch."""
    [batch] = store.open_batches()
    found = dict[str, int]()

    def asked() -> bool:
        router = app.info()["router"]
        found[router["router_id"]] = router["pid"]
        return batch["router"] in found

    app.until(asked, 60)
    return found[batch["router"]]


def replica_pid(app: Running, store: BatchStore) -> int:
    return int(max(app.states(), key=lambda state: int(state["num_open"]))["replica"]["pid"])
