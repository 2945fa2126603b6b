"""Files and batches, as OpenAI's SDK asks for them over HTTP: what comes out, in which order lines run, what cuts a
batch off, and that each line has one entry whatever happens.

What a replica does is scripted, where it matters when; one batch is answered by the real model.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from deployments import __main__ as command_line
from deployments.batches import runner as runners
from deployments.batches import store as stores
from deployments.batches.runner import BatchRunner, Runs, keyed_lines
from deployments.batches.store import BatchStore, FolderFull, Line, LineEntry, TooMany, batch_store, entry_text
from deployments.http.access import browser_rules
from deployments.http.http_app import make_app
from deployments.http.lines import line_answers
from deployments.http.service import Service
from deployments.record.route_log import RequestWatch
from deployments.tenancy.keys import NO_KEYS, KeyDigests, read_keys
from replicas.errors import Fault, InvalidConfig, InvalidRequest, MantaError, Overloaded, StepFailed
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of, listening
from tests.waiting import until_async

pytestmark = pytest.mark.model
NAME = MODEL.rsplit("/", 1)[-1]
CHAT = "/v1/chat/completions"
FILE = 4096  # that a file counts at least
EMPTY = 11 * 4096  # a database without rows


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "KEEP_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(runners, name, 0.02)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "batches", max_bytes=1 << 30)


def line(number: int, text: str = "Tell me of Rome.", **body: Any) -> dict[str, Any]:
    chat = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": chat}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def runner_of(
    service: Service, watch: RequestWatch | None = None, keys: KeyDigests = NO_KEYS, *, most: int = 1_000
) -> BatchRunner:
    """``most``: lines that a replica has at once."""
    assert service.batches is not None
    return BatchRunner(
        service.batches, line_answers(service, keys), router_id="router", max_line_bytes=service.max_body_bytes,
        places=lambda: {name: min(most, places) for name, places in service.fleet.line_places().items()}, watch=watch,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(runner: BatchRunner) -> AsyncIterator[BatchRunner]:
    task = asyncio.create_task(runner.run_forever())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def served(service: Service, *keys: str) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """The SDK over sockets, with each of ``keys``."""
    digests = NO_KEYS
    if keys:
        digests = read_keys(api_key_file=None, admin_key=None, environ={"MANTA_API_KEYS": ",".join(keys)})
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(listening(make_app(service, keys=digests)))
        stack.callback(service.background.stop)
        clients = [
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=30)
            for key in keys or ("any",)
        ]
        for client in clients:
            stack.push_async_callback(client.close)
        yield clients


@contextlib.asynccontextmanager
async def scripted(
    tokenizer: Tokenizer, store: BatchStore, *keys: str, left: KeyDigests = NO_KEYS, watch: RequestWatch | None = None,
    **options: Any,
) -> AsyncIterator[tuple[ScriptedReplica, list[openai.AsyncOpenAI]]]:
    """A router whose batches run on one scripted replica, and the SDK with each of ``keys``. ``left``: the keys that
    there are when lines run."""
    async with House() as house:
        service, replica = house.service(tokenizer, batches=store, **options), ScriptedReplica("r0")
        await house.ready(replica)
        async with served(service, *keys) as sdks, running(runner_of(service, watch, left)):
            yield replica, sdks


async def begun(sdk: openai.AsyncOpenAI, lines: Sequence[Any], window: Any = "24h") -> Batch:
    file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await sdk.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window=window, metadata={"of": "test"}
    )


async def ended(sdk: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(60):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.02)
            batch = await sdk.batches.retrieve(batch.id)
    return batch


async def entries(sdk: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await sdk.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


async def test_a_batch_gives_the_answers_of_the_real_model(service: Service, store: BatchStore) -> None:
    service = dataclasses.replace(service, batches=store)
    async with served(service) as [sdk], running(runner_of(service)) as runner:
        texts = ["The capital of France is", "Count to three.", "Say hello."]
        batch = await begun(sdk, [line(n, text) for n, text in enumerate(texts)])
        assert (batch.status, batch.metadata) == ("validating", {"of": "test"})
        await until_async(lambda: [each["id"] for each in runner.progress()] == [batch.id])
        done = await ended(sdk, batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
        assert done.error_file_id is None
        told = await entries(sdk, done.output_file_id)
        assert [each["custom_id"] for each in told] == ["line-0", "line-1", "line-2"]
        for each, text in zip(told, texts, strict=True):
            alone = await sdk.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0
            )
            assert each["response"]["status_code"] == 200
            assert each["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
            assert each["error"] is None
        assert Batch.model_validate(done.model_dump(), strict=True)


@pytest.mark.parametrize(
    ("keys", "refused"), [(["the-only-key-that-there-is"], False), (["a-key-of-one", "a-key-of-two"], True)]
)
async def test_a_key_may_fill_the_folder_where_it_is_the_only_one(
    tokenizer: Tokenizer, tmp_path: Path, keys: list[str], refused: bool
) -> None:
    store = BatchStore(tmp_path / "batches", max_bytes=EMPTY + 3 * FILE)
    async with House() as house, served(house.service(tokenizer, batches=store), *keys) as [sdk, *others]:
        await sdk.files.create(file=b"x" * 60, purpose="batch")
        expected = pytest.raises(openai.APIStatusError, match="no more files are kept")
        with expected if refused else contextlib.nullcontext():
            await sdk.files.create(file=b"x" * 30, purpose="batch")
        for other in others:  # room was left for it
            await other.files.create(file=b"x" * 30, purpose="batch")


async def test_files_are_kept_listed_in_pages_and_deleted(tokenizer: Tokenizer, store: BatchStore) -> None:
    async with House() as house, served(house.service(tokenizer, batches=store)) as [sdk]:
        content = random.Random(0).randbytes(300_000)  # in which a boundary's begin stands often
        files = [await sdk.files.create(file=(f"{n}.bin", content + b"\r\n--"), purpose="batch") for n in range(3)]
        assert [file.filename for file in files] == ["0.bin", "1.bin", "2.bin"]
        assert (await sdk.files.content(files[1].id)).content == content + b"\r\n--"
        assert (await sdk.files.retrieve(files[0].id)).bytes == len(content) + 4
        first = await sdk.files.list(limit=2)
        assert [each.id for each in first.data] == [files[2].id, files[1].id]
        assert [each.id async for each in first] == [files[2].id, files[1].id, files[0].id]
        assert [each.id async for each in await sdk.files.list(order="asc", purpose="batch")] == [f.id for f in files]
        assert (await sdk.files.delete(files[1].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.files.content(files[1].id)
        with pytest.raises(openai.NotFoundError):
            await sdk.files.delete(files[1].id)
        assert sorted(path.name for path in (store.folder / "files").iterdir()) == sorted([files[0].id, files[2].id])
        lasting = await sdk.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert lasting.expires_at == lasting.created_at + 3600


async def test_what_is_wrong_is_told_in_openais_form(tokenizer: Tokenizer, tmp_path: Path) -> None:
    full = BatchStore(tmp_path, max_bytes=EMPTY + 2 * FILE)
    async with House() as house, served(house.service(tokenizer, batches=full, max_file_bytes=1000)) as [sdk]:
        with pytest.raises(openai.APIStatusError, match="more than 1,000 bytes") as too_large:
            await sdk.files.create(file=b"x" * 1001, purpose="batch")
        assert too_large.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="anchor"):
            await sdk.files.create(
                file=b"x",
                purpose="batch",
                expires_after={"anchor": "used_at", "seconds": 3600},  # type: ignore[typeddict-item]
            )
        for purpose in ("batch", "fine-tune"):
            file = await sdk.files.create(file=b"x" * 60, purpose=purpose)  # type: ignore[arg-type]
        with pytest.raises(openai.APIStatusError, match="delete some") as no_room:
            await sdk.files.create(file=b"x", purpose="batch")
        assert (no_room.value.status_code, no_room.value.code) == (413, "files_full")
        wanted: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for wrong, word in (
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "8d"}, "completion_window"),
            ({"input_file_id": "file-none"}, "no such file"),
            ({}, "purpose is fine-tune"),
        ):
            with pytest.raises(openai.BadRequestError, match=word):
                await sdk.batches.create(**{**wanted, **wrong})
        with pytest.raises(openai.NotFoundError):
            await sdk.batches.retrieve("batch_none")
        with pytest.raises(openai.NotFoundError):
            await sdk.batches.cancel("batch_none")
        assert len(list((tmp_path / "files").iterdir())) == 2  # nothing is left of what was refused


async def test_an_upload_has_bounds_on_its_fields_its_bytes_and_its_time(
    tokenizer: Tokenizer, store: BatchStore
) -> None:
    def form(*fields: str) -> bytes:
        parts = [f'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n{field}\r\n' for field in fields]
        return "".join(parts).encode()

    async def slowly() -> AsyncIterator[bytes]:
        for byte in form("a") * 20:
            yield bytes([byte])
            await asyncio.sleep(0.02)

    async with House() as house:
        app = make_app(house.service(tokenizer, batches=store, max_file_bytes=1000, body_timeout_s=0.3))
        async with client_of(app, "http://127.0.0.1") as client:
            for content, status, why in (
                (form(*["a"] * 17), 400, "more than 16 fields"),
                (form(*["a" * 10_000] * 7), 413, "the form has more than 66,536 bytes"),
                (slowly(), 408, "came in a second"),
            ):
                headers = {"Content-Type": "multipart/form-data; boundary=x"}
                answer = await client.post("/v1/files", content=content, headers=headers)
                assert (answer.status_code, why in answer.text) == (status, True), answer.text


async def test_a_batch_whose_input_is_gone_fails_and_one_that_is_late_expires(
    tokenizer: Tokenizer, store: BatchStore
) -> None:
    async with House() as house:
        service = house.service(tokenizer, batches=store)
        async with served(service) as [sdk]:
            gone, late = await begun(sdk, [line(0)]), await begun(sdk, [line(1)], "1s")
            store.path(gone.input_file_id).unlink()
            assert not store.delete_file("another", late.input_file_id)  # and is not told that it is in use
            await asyncio.sleep(1.1)
            async with running(runner_of(service)):
                assert [(await ended(sdk, each)).status for each in (gone, late)] == ["failed", "expired"]
        with pytest.raises(InvalidRequest, match="no such file"):
            store.add_batch(owner="", endpoint=CHAT, input_file_id="file-gone", window="24h", window_s=9, metadata=None)


def test_a_folder_that_others_can_write_or_that_cannot_be_made_is_refused_by_its_setting(tmp_path: Path) -> None:
    made = batch_store(str(tmp_path / "new"), max_bytes=1)
    assert made is not None
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made.folder, made.folder / "files")] == [0o700] * 2
    (tmp_path / "a file").touch()
    made.folder.chmod(0o777)
    for wrong, why in ((made.folder, "written by others"), (tmp_path / "a file" / "b", "Not a directory")):
        with pytest.raises(InvalidConfig, match=rf"router\.batch_folder: .*{why}"):
            batch_store(str(wrong), max_bytes=1)


async def test_without_a_folder_the_routes_say_which_setting_makes_one(tokenizer: Tokenizer) -> None:
    async with House() as house, served(house.service(tokenizer)) as [sdk]:
        for ask in (sdk.files.list(), sdk.batches.list(), sdk.files.create(file=b"x", purpose="batch")):
            with pytest.raises(openai.NotFoundError, match=r"router\.batch_folder"):
                await ask


async def test_a_form_is_no_way_in_for_pages(tokenizer: Tokenizer, store: BatchStore) -> None:
    rules = browser_rules(listens_on="127.0.0.1", has_keys=False, allowed_hosts=())
    async with House() as house:
        app = make_app(house.service(tokenizer, batches=store), browsers=rules)
        async with client_of(app, "http://127.0.0.1") as client:
            form: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
            assert (await client.post("/v1/files", **form)).status_code == 200
            for page, status in (
                ({"Origin": "http://evil.example"}, 403),
                ({"Origin": "null"}, 403),  # a sandboxed frame
                ({"Sec-Fetch-Site": "cross-site"}, 403),
                ({"Sec-Fetch-Site": "same-site"}, 403),
                ({"Host": "evil.example"}, 403),
                ({"Origin": "http://127.0.0.1"}, 415),  # a page of our own has no such form
                ({"Sec-Fetch-Site": "none"}, 415),
                ({"Referer": "http://evil.example/"}, 415),  # a form of an old browser
            ):
                assert (await client.post("/v1/files", **form, headers=page)).status_code == status, page
            assert len((await client.get("/v1/files")).json()["data"]) == 1
            assert (await client.post("/v1/batches", **form)).status_code == 415


async def test_lines_of_a_key_that_is_gone_are_not_run(tokenizer: Tokenizer, store: BatchStore) -> None:
    left = read_keys(api_key_file=None, admin_key=None, environ={"MANTA_API_KEYS": "b" * 20})
    async with scripted(tokenizer, store, "a" * 20, left=left) as (replica, [sdk]):
        batch = await ended(sdk, await begun(sdk, [line(0)]))
        assert (batch.status, batch.output_file_id, replica.requests) == ("completed", None, [])
        [entry] = await entries(sdk, batch.error_file_id)
        assert (entry["custom_id"], entry["response"]["status_code"]) == ("line-0", 401)


async def test_one_keys_files_and_batches_do_not_exist_for_another(tokenizer: Tokenizer, store: BatchStore) -> None:
    async with scripted(tokenizer, store, "a" * 20, "b" * 20) as (replica, [mine, theirs]):
        batch = await ended(mine, await begun(mine, [line(0)]))
        assert batch.output_file_id is not None
        for ask in (
            theirs.batches.retrieve(batch.id),
            theirs.batches.cancel(batch.id),
            theirs.files.content(batch.output_file_id),
            theirs.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        assert [each async for each in await theirs.batches.list()] == []
        assert [each async for each in await theirs.files.list()] == []
        with pytest.raises(openai.BadRequestError, match="no such file"):
            await theirs.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        [asked] = replica.requests
        assert asked.offline
        assert asked.cache_salt.startswith("\0")  # it shares cached prefixes with its key's requests alone
        none = openai.AsyncOpenAI(base_url=mine.base_url, api_key="c" * 20, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await none.files.list()
        await none.close()


HOSTILE = b'{"custom_id": "h-%d", "method": "POST", "url": "/v1/chat/completions", "body": %b}'
HOSTILE_BODIES = [b"[" * 60_000, b'{"a":' * 9_000, b'{"x": "\\ud800"}', b'{"temperature": NaN}', b'{"x": "\xff\xfe"}',
                  b"[" + b"{}," * 20_000 + b"{}]", b'{"n": ' + b"9" * 5_000 + b"}"]  # fmt: skip


async def test_a_line_that_cannot_be_run_has_an_entry_in_the_error_file(
    tokenizer: Tokenizer, store: BatchStore
) -> None:
    wrong = [
        b"{no json",
        b'"a text"',
        {"method": "POST", "url": CHAT, "body": {}},
        line(0),  # a second one of this custom_id
        {**line(5), "url": "/v1/completions"},
        line(6, stream=True),
        line(7, max_tokens=-1),
        line(8, model="another"),
        b'{"custom_id": "long", "body": "' + b"x" * 70_000 + b'"}',
        {**line(10), "method": "GET"},
        *(HOSTILE % (number, body) for number, body in enumerate(HOSTILE_BODIES)),
    ]
    async with scripted(tokenizer, store, max_body_bytes=65_536) as (_, [sdk]):
        done = await ended(sdk, await begun(sdk, [line(0), b"", *wrong, line(9)]))
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": len(wrong) + 2, "completed": 2, "failed": len(wrong)}
        told = await entries(sdk, done.error_file_id)
        codes = [each["error"] and each["error"]["code"] for each in told]
        assert codes[:9] == [
            "invalid_json_line", "invalid_line", "invalid_line", "duplicate_custom_id", "invalid_line",
            "invalid_line", None, None, "invalid_line",
        ]  # fmt: skip
        assert [each["response"] and each["response"]["status_code"] for each in told][6:8] == [400, 404]
        rest = {code or each["response"]["status_code"] for code, each in zip(codes[9:], told[9:], strict=True)}
        assert rest == {"invalid_json_line", "invalid_line", 400}
        assert "max_tokens" in told[6]["response"]["body"]["error"]["message"]
        ok = await entries(sdk, done.output_file_id)
        assert [each["custom_id"] for each in ok] == ["line-0", "line-9"]


@pytest.mark.parametrize(
    ("lines", "why"),
    [([b""] * 9, "it is empty"), ([line(n) for n in range(4)], "more than 3 lines")],
)
async def test_a_file_without_lines_or_with_too_many_fails(
    tokenizer: Tokenizer, store: BatchStore, lines: list[Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "MAX_LINES", 3)
    async with scripted(tokenizer, store) as (_, [sdk]):
        done = await ended(sdk, await begun(sdk, lines))
        assert (done.status, done.output_file_id) == ("failed", None)
        assert done.errors is not None
        assert done.errors.data is not None
        assert why in str(done.errors.data[0].message)
        await sdk.files.delete(done.input_file_id)


async def test_a_cancelled_batch_keeps_what_was_answered_and_an_expired_one_says_what_was_not(
    tokenizer: Tokenizer, store: BatchStore
) -> None:
    async with scripted(tokenizer, store) as (replica, [sdk]):
        for window, status in (("24h", "cancelled"), ("2s", "expired")):
            replica.requests.clear()
            replica.hold.set()
            replica.pause_at = 3  # of the first one that gets there
            batch = await begun(sdk, [line(n) for n in range(4)], window)
            await until_async(lambda: not replica.hold.is_set())
            with pytest.raises(openai.ConflictError):
                await sdk.files.delete(batch.input_file_id)
            if status == "cancelled":
                assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
            done = await ended(sdk, batch)
            assert done.status == status
            failed = await entries(sdk, done.error_file_id)
            answered = await entries(sdk, done.output_file_id)
            if status == "expired":
                assert len(failed) + len(answered) == 4
                assert {each["error"]["code"] for each in failed} == {"batch_expired"}
            assert replica.num_aborted > 0


async def test_a_line_waits_while_others_would_be_late_and_runs_later(tokenizer: Tokenizer, store: BatchStore) -> None:
    """503 and 429 are no entries; a server that fails again and again with one line is."""
    watch = Lines()
    async with scripted(tokenizer, store, watch=watch) as (replica, [sdk]):
        replica.refuse = Overloaded("it is full")
        batch = await begun(sdk, [line(0)])
        await until_async(lambda: watch.ran["repeated"] >= 5)
        assert (await sdk.batches.retrieve(batch.id)).status == "in_progress"
        replica.refuse = None
        assert (await ended(sdk, batch)).output_file_id is not None
        assert (watch.ran["completed"], watch.running) == (1, 0)
        watch.ran.clear()
        replica.refuse = MantaError("it cannot compute this one")
        done = await ended(sdk, await begun(sdk, [line(0)]))
        assert watch.ran == {"repeated": 2, "failed": 1}
        [told] = await entries(sdk, done.error_file_id)
        assert told["response"]["status_code"] == 500
        watch.ran.clear()
        replica.refuse = StepFailed("no such index")
        await ended(sdk, await begun(sdk, [line(0)]))
        assert watch.ran == {"failed": 1}


class Lines(RequestWatch):
    """What the metrics are told of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.running = self.stalled = 0

    def batches_stalled(self, num: int) -> None:
        self.stalled = num

    def line_ran(self, outcome: str) -> None:
        self.ran[outcome] += 1

    def lines_running(self, num: int) -> None:
        self.running = num


def test_lines_that_are_run_again_come_behind_all_others_in_turn() -> None:
    runs = Runs([Line(n, 0, 0, str(n)) for n in range(4)])
    for line in [runs.take("a"), runs.take("a")]:
        assert line is not None
        runs.again(line)
    assert [each.number for each in [runs.take("a") for _ in range(4)] if each is not None] == [2, 3, 0, 1]
    assert runs.take("a") is None


def test_runs_are_halved_for_who_is_through_and_free_when_their_replica_is_gone() -> None:
    lines = [Line(n, 0, 0, str(n)) for n in range(8)]
    runs = Runs(lines)
    runs.keep({"a": 1, "b": 1})
    taken = [runs.take("a"), runs.take("b")]
    assert [each.number for each in taken if each is not None] == [0, 4]
    assert [each.number for each in [runs.take("b") for _ in range(3)] if each is not None] == [5, 6, 7]
    again = runs.take("b")
    assert again is not None
    assert again.number == 2  # of 1, 2, 3 the second half
    runs.again(again)
    runs.keep({"b": 1})  # a is gone
    rest = []
    while (each := runs.take("b")) is not None:
        rest.append(each.number)
    assert sorted(rest) == [1, 2, 3]
    assert len(runs) == 0


def test_the_order_is_that_of_the_prompts_trie(store: BatchStore, tmp_path: Path) -> None:
    texts = ["b", "a long prefix, then x", "a", "a long prefix, then y", "b, and more", "a long prefix"]
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([line(n, text) for n, text in enumerate(texts)]))
    batch = claimed(store, path)
    store.put_in_order(batch, keyed_lines(path, CHAT, max_bytes=1 << 20), max_lines=100)
    order = [texts[each.number] for each in store.to_run(batch["id"])]
    groups = [text[0] for text in order]
    assert groups == sorted(groups)
    long = [at for at, text in enumerate(order) if text.startswith("a long prefix")]
    assert long == list(range(long[0], long[0] + 3))  # neighbours


def kept(store: BatchStore, data: bytes, owner: str = "") -> str:
    """The id of a file of ``owner``'s, which is kept."""
    file_id = store.new_file(owner, num_bytes=len(data), alone=not owner)
    store.path(file_id).write_bytes(data)
    store.add_file(file_id, owner=owner, filename="f", purpose="batch", kept_s=None)
    return file_id


def made(store: BatchStore, data: bytes, owner: str = "") -> str:
    """The id of a batch of ``owner``'s, which nobody runs yet."""
    row = store.add_batch(
        owner=owner, endpoint=CHAT, input_file_id=kept(store, data, owner), window="24h", window_s=86_400, metadata=None
    )
    return str(row["id"])


def claimed(store: BatchStore, path: Path, router: str = "r") -> dict[str, Any]:
    """A batch over the file at ``path``, which ``router`` has taken."""
    batch_id = made(store, path.read_bytes())
    return next(row for row in store.claim(router, hold_s=60, most=9) if row["id"] == batch_id)


def test_each_owner_has_a_batch_run_before_another_one_has_its_second(store: BatchStore) -> None:
    def held(router: str) -> list[str]:
        return [row["id"] for row in store.claim(router, hold_s=60, most=2)]

    first, second, third = (made(store, b"{}", "many") for _ in range(3))
    assert held("r0") == [first, second]
    other = made(store, b"{}", "few")
    assert held("r0") == [first, other]  # the second one has given way
    assert held("r1") == [second, third]
    assert held("r0") == [first, other]
    store.release("r0")
    assert held("r1") == [second, other]  # an older one of the same owner is free now, and takes nothing's place


def test_files_that_come_at_once_take_no_more_room_than_there_is_whichever_router_they_come_to(tmp_path: Path) -> None:
    """Class 40: 8 uploads at once of 15 MiB passed a bound of 64."""
    now = 1000.0
    one, other = (BatchStore(tmp_path, max_bytes=64 << 20, clock=lambda: now) for _ in range(2))
    taken = list[str]()
    for number in range(8):
        with contextlib.suppress(FolderFull):
            taken.append((one, other)[number % 2].new_file("", num_bytes=15 << 20, alone=True))
    assert len(taken) == 4
    other.drop_room(taken[0])
    one.new_file("", num_bytes=15 << 20, alone=True)
    now += 3601  # their routers have died
    for file_id in taken:
        one.path(file_id).write_bytes(b"x" * (5 << 20))
    kept(other, b"x" * (60 << 20))
    with pytest.raises(FolderFull):  # it took so long that its room is another one's
        one.add_file(taken[1], owner="", filename="f", purpose="batch", kept_s=None)


def test_a_key_has_so_many_files_and_open_batches_and_what_batches_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 41: 3,000 batches with 15 KB of metadata each, and 1,500 empty files, counted as nothing."""
    monkeypatch.setattr(stores, "MOST_FILES", 4)
    monkeypatch.setattr(stores, "MOST_OPEN", 2)
    store = BatchStore(tmp_path, max_bytes=EMPTY + 80 * FILE)
    made(store, b"{}", "a")
    made(store, b"{}", "a")
    with pytest.raises(TooMany, match="2 batches that have not ended") as refused:
        made(store, b"{}", "a")
    assert refused.value.fault is Fault.TOO_MANY
    kept(store, b"", "a")
    for call in (lambda: store.new_file("a", num_bytes=0, alone=False), lambda: made(store, b"{}", "a")):
        with pytest.raises(TooMany, match="4 files"):
            call()
    file_id = kept(store, b"", "b")
    monkeypatch.setattr(stores, "MOST_OPEN", 1000)
    many = functools.partial(
        store.add_batch, owner="b", endpoint=CHAT, input_file_id=file_id, window="24h", window_s=9,
        metadata={"x": "y" * 15_000},
    )  # fmt: skip
    for _ in range(5):  # of five pages each, in a half of 80
        many()
    with pytest.raises(FolderFull):  # it leaves room for others
        [many() for _ in range(5)]


def test_ended_batches_and_their_outputs_are_swept_after_thirty_days(tmp_path: Path) -> None:
    now = 1_000_000.0
    store = BatchStore(tmp_path, max_bytes=1 << 30, clock=lambda: now)
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line(0)]))
    batch = claimed(store, source)
    store.put_in_order(batch, keyed_lines(source, CHAT, max_bytes=1 << 20), max_lines=9)
    store.add_entries(batch, [LineEntry(0, True, entry_text("line-0"))])
    store.finish(batch, "completed")
    store.write_files(batch | {"ends_as": "completed"})
    still = made(store, b"{}")
    now += 30 * 86_400 - 10
    store.sweep()
    assert len(store.files("", purpose="batch_output", after=None, most=9, ascending=True)[0]) == 1
    now += 20
    store.sweep()
    assert [row["id"] for row in store.batches("", after=None, most=9)[0]] == [still]
    assert store.files("", purpose="batch_output", after=None, most=9, ascending=True)[0] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, *, left: int = 0) -> Path:
    """Fill its disk but for ``left`` bytes."""
    filler = folder / "filler"
    space = os.statvfs(folder)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
        out.write(b"x" * max(space.f_bavail * space.f_frsize - left, 0))
        while not left:
            out.write(b"x")
    return filler


async def test_an_upload_to_a_full_disk_gets_507_and_a_line_in_the_log_and_files_can_be_deleted_there(
    tokenizer: Tokenizer, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Class 43; on a disk that is read-only, or gone, it is 503."""
    store = BatchStore(small_disk / "b", max_bytes=1 << 30)
    async with House() as house, served(house.service(tokenizer, batches=store)) as [sdk]:
        file = await sdk.files.create(file=b"x" * 50_000, purpose="batch")
        fill(small_disk)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="has no room on its disk") as full:
                await sdk.files.create(file=b"y" * 90_000, purpose="batch")
            assert (full.value.status_code, full.value.code) == (507, "batch_folder_fails")
        [told] = [record for record in caplog.records if record.levelname == "ERROR"]
        assert told.exc_info is None
        assert (await sdk.files.delete(file.id)).deleted
        assert list((store.folder / "files").iterdir()) == []
        await sdk.files.create(file=b"y" * 20_000, purpose="batch")
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(openai.InternalServerError, match="cannot be used") as read_only:
            await sdk.files.create(file=b"y", purpose="batch")
        assert (read_only.value.status_code, "retry-after" in read_only.value.response.headers) == (503, True)
        assert len((await sdk.files.list()).data) == 1  # reading goes on


class Tried(BatchStore):
    """Counts how often entries were to be kept."""

    num_tried = 0

    def add_entries(self, batch: Any, entries: Any) -> None:
        self.num_tried += 1
        super().add_entries(batch, entries)


async def test_no_line_is_computed_twice_while_the_disk_is_full_and_it_is_told(
    tokenizer: Tokenizer, small_disk: Path
) -> None:
    """Fault F2 of the fourth turn: 1,100 lines were computed for 100 in 35 s, and nobody was told."""
    store = Tried(small_disk / "b", max_bytes=1 << 30)
    async with House() as house:
        service, watch = house.service(tokenizer, batches=store), Lines()
        replica = ScriptedReplica("r0")
        await house.ready(replica)
        async with served(service) as [sdk]:
            batch = await begun(sdk, [line(n, f"Tell me of {n}.") for n in range(100)])
            filler = fill(small_disk, left=45_000)  # for their order, and for some entries
            runner = runner_of(service, watch, most=8)
            async with running(runner):
                await until_async(lambda: watch.stalled == 1)
                async with asyncio.timeout(60):  # for that too there may be no room at first
                    while (told := await sdk.batches.retrieve(batch.id)).errors is None:
                        await asyncio.sleep(0.02)
                assert told.errors.data is not None
                assert told.errors.data[0].code == "storage_failed"
                assert told.status == "in_progress"
                assert "has no room on its disk" in runner.progress()[0]["problem"]
                num = watch.ran["completed"]
                tried = store.num_tried
                await until_async(lambda: store.num_tried > tried + 3)
                assert watch.ran["completed"] == num  # and those that ran wait to be kept
                filler.unlink()
                done = await ended(sdk, batch)
            assert (done.status, done.errors, watch.stalled) == ("completed", None, 0)
            found = await entries(sdk, done.output_file_id)
        assert [each["custom_id"] for each in found] == [f"line-{n}" for n in range(100)]
        assert (watch.ran, len(replica.requests)) == ({"completed": 100}, 100)


@pytest.mark.parametrize("body", [None, b"oops", b'{"error":null}'])
async def test_a_line_whose_answer_fails_unforeseen_ends_alone(store: BatchStore, body: bytes | None) -> None:
    """As F2: such a line ended the run of all, which began again each second. ``body``: of a 500; None: it raises."""
    runs = Counter[int]()

    async def answer(batch: Any, line: Line, _: bytes, replica: str) -> tuple[int, str, bytes]:
        runs[line.number] += 1
        if line.number == 1 and body is None:
            raise RuntimeError("unforeseen")
        if line.number == 1:
            return 500, "r", body
        return 200, "r", b"{}"

    batch_id = made(store, jsonl([line(n) for n in range(3)]))
    runner = BatchRunner(store, answer, router_id="r", places=lambda: {"a": 4}, max_line_bytes=1 << 20)

    async with running(runner):
        await until_async(lambda: (store.batch("", batch_id) or {})["status"] == "completed")
    done = store.batch("", batch_id) or {}
    assert (runs, done["completed"], done["failed"]) == ({0: 1, 1: 3, 2: 1}, 2, 1)


def test_a_batch_is_one_routers_and_another_takes_it_when_its_time_is_over(tmp_path: Path) -> None:
    now = 1000.0
    store = BatchStore(tmp_path / "b", max_bytes=1 << 30, clock=lambda: now)
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line(n) for n in range(3)]))
    batch = claimed(store, source, "first")
    store.put_in_order(batch, keyed_lines(source, CHAT, max_bytes=1 << 20), max_lines=9)
    assert store.claim("second", hold_s=60, most=9) == []
    store.add_entries(batch, [LineEntry(0, True, entry_text("line-0"))])
    now += 61
    [taken] = store.claim("second", hold_s=60, most=9)
    assert [each.number for each in store.to_run(batch["id"])] == [1, 2]
    store.add_entries(
        batch, [LineEntry(1, True, '{"of": "first"}')]
    )  # it was only slow: the batch is not its own any more
    store.add_entries(taken, [LineEntry(1, True, '{"of": "second"}'), LineEntry(1, True, '{"of": "third"}')])
    store.add_entries(taken, [LineEntry(2, False, '{"of": "second"}')])
    store.finish(taken, "completed")
    store.finish(batch, "expired")
    [ending] = store.claim("second", hold_s=60, most=9)
    store.write_files(batch | {"ends_as": "completed"})  # nothing: it is not the first one's
    store.write_files(ending)
    done = store.batch("", batch["id"])
    assert done is not None
    assert (done["status"], done["completed"], done["failed"]) == ("completed", 2, 1)
    told = store.path(done["output_file_id"]).read_text().splitlines()
    assert [json.loads(each).get("of") for each in told] == [None, "second"]
    assert len(list((store.folder / "files").iterdir())) == 3
    store.release("second")
    assert store.claim("third", hold_s=60, most=9) == []


def test_files_that_expire_and_uploads_that_were_cut_off_are_swept(tmp_path: Path) -> None:
    now = 1_000_000.0
    store = BatchStore(tmp_path, max_bytes=1 << 30, clock=lambda: now)
    for kept_s in (10, None):
        file_id = store.new_file("", num_bytes=1, alone=True)
        store.path(file_id).write_bytes(b"x")
        store.add_file(file_id, owner="", filename="f", purpose="batch", kept_s=kept_s)
    store.path("file-cut-off").write_bytes(b"x")
    for path in (tmp_path / "files").iterdir():
        os.utime(path, (now, now))
    now += 20
    store.sweep()
    assert len(store.files("", purpose=None, after=None, most=9, ascending=True)[0]) == 1
    now += 3600
    store.sweep()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file_id]


KILLED = """
import asyncio, sys, json
from pathlib import Path
from deployments.batches import runner as runners
from deployments.batches.runner import BatchRunner
from deployments.batches.store import BatchStore

runners.HOLD_S, runners.LOOK_S, runners.KEEP_S = 0.3, 0.02, 0.02

async def answer(batch, line, body, replica):
    await asyncio.sleep(0.024)
    return 200, str(line.number), json.dumps({"of": json.loads(body)["n"]}).encode()

store = BatchStore(Path(sys.argv[1]), max_bytes=1 << 30)
runner = BatchRunner(store, answer, router_id=sys.argv[2], places=lambda: {"a": 4, "b": 4}, max_line_bytes=1 << 20)
asyncio.run(runner.run_forever())
"""


def test_kills_of_routers_at_any_moment_lose_and_double_no_line(tmp_path: Path) -> None:
    """Two routers over one folder, one of which is killed again and again (kill -9), from the order on to the files."""
    chance, num_lines = random.Random(0), 1000
    store = BatchStore(tmp_path / "b", max_bytes=1 << 30)
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        jsonl([{"custom_id": f"c{n}", "url": CHAT, "body": {"n": n, "prompt": f"{n % 7}"}} for n in range(num_lines)])
    )
    batch = claimed(store, source, "gone")
    store.release("gone")
    routers: dict[int, subprocess.Popen[bytes]] = {}
    num_kills = number = 0
    done: dict[str, Any] | None = batch

    def spawn() -> None:
        nonlocal number
        number += 1
        routers[number] = subprocess.Popen([sys.executable, "-c", KILLED, str(store.folder), f"router{number}"])

    try:
        spawn()
        spawn()
        while (done := store.batch("", batch["id"])) is not None and done["status"] != "completed":
            holder = str(done["router"]).removeprefix("router")
            if not holder.isdecimal() or int(holder) not in routers:
                time.sleep(0.05)  # a process that starts takes the batch soon
                continue
            victim = int(holder)
            time.sleep(chance.uniform(0.0, 1.0))  # 1,000 lines at 8 places take three seconds
            killed = routers.pop(victim)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            num_kills += 1
            spawn()
            assert num_kills < 100, done
    finally:
        for each in routers.values():
            each.kill()
            each.wait()
    assert done is not None
    told = [json.loads(each) for each in store.path(done["output_file_id"]).read_text().splitlines()]
    assert [each["custom_id"] for each in told] == [f"c{n}" for n in range(num_lines)]
    assert [each["response"]["body"]["of"] for each in told] == list(range(num_lines))
    assert (done["completed"], done["failed"], done["total"]) == (num_lines, 0, num_lines)
    assert num_kills >= 2


async def test_manta_batch_shows_how_far_batches_are_and_ends_one(
    tokenizer: Tokenizer, store: BatchStore, capsys: pytest.CaptureFixture[str]
) -> None:
    async with House() as house:
        service = house.service(tokenizer, batches=store)
        async with served(service) as [sdk]:
            url = str(sdk.base_url).removesuffix("/v1/")

            async def show(*words: str) -> int:
                return await asyncio.to_thread(command_line.main, ["batch", "--url", url, *words])

            assert await show() == 0
            assert "no batch" in capsys.readouterr().out
            async with running(runner_of(service)):
                await house.ready(ScriptedReplica("r0"))
                done = await ended(sdk, await begun(sdk, [line(0), line(1, max_tokens=-1), line(2)]))
            assert await show(done.id) == 0
            shown = capsys.readouterr().out
            assert "3 of 3" in shown
            assert str(done.output_file_id) in shown
            waiting = await begun(sdk, [line(0)])
            assert await show(waiting.id, "--cancel") == 0
            assert "cancelling" in capsys.readouterr().out
            assert await show("batch_none") == 1
            assert "no batch" in capsys.readouterr().err
