"""What strangers try, by the numbers of classes.md beside this, where no test of the part that is attacked holds it.

The whole app over a scripted replica: of a served Manta, Ray and the model's numbers are left out.
"""

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards.catalog import Process
from deployments.batches import runner as runners
from deployments.batches.store import BatchStore
from deployments.http.apis import batches as uploads
from deployments.http.http_app import make_app
from deployments.settings.adapters import Adapters, AdapterSettings
from deployments.tenancy.keys import read_keys
from deployments.tenancy.quotas import KINDS, Quotas
from deployments.tenancy.tenants import TenantKeys
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.router_events import RouterEvents
from replicas.checkpoints.adapters import CONFIG, WEIGHTS
from replicas.errors import InvalidConfig
from replicas.text.tokenizer import Tokenizer
from tests.adapters import make_adapter
from tests.embedded import MODEL
from tests.scraped import Scraped
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of, listening
from tests.unit.deployments.test_batches import CHAT, NAME, Lines, jsonl, line, runner_of, running
from tests.unit.deployments.test_quotas import entry, written
from tests.waiting import until_async

pytestmark = pytest.mark.model
ONE, OTHER, CHIEF = "a-key-of-one-stranger", "a-key-of-another-stranger", "a-key-of-the-chief"
FEW, EIGHT = "a-key-with-few-tokens", "a-key-with-eight-choices"
TEXT, HI = "/v1/completions", [{"role": "user", "content": "hi"}]
MOST_BYTES = 4 << 20  # of a file
ENTRIES = [
    entry(ONE, "one"), entry(OTHER, "other"), entry(CHIEF, "chief", admin=True),
    entry(FEW, "few", limits={"input_tokens": 100}), entry(EIGHT, "eight", limits={"choices": 8}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


class Served:
    """A router whose keys are those of a file, with one scripted replica, files and adapters."""

    def __init__(self, house: House, tokenizer: Tokenizer, folder: Path, keys: list[dict[str, Any]]) -> None:
        file = written(folder / "keys.yaml", keys)
        digests = read_keys(api_key_file=None, admin_key=None, keys_file=file, environ={})
        assert digests.tenants is not None
        house.dispatcher.quotas = self.quotas = Quotas(digests.tenants, clock=lambda: 0.0)
        self.emitter = Emitter(Process.ROUTER, Identity(model="m", role="router", replica="r"), disaggregated=False)
        house.dispatcher.watch = RouterEvents(
            self.emitter, objectives={"ttft_objective_s": 5.0, "itl_objective_s": 1.0}, disaggregated=False
        )
        (folder / "all").mkdir()
        adapters = AdapterSettings(roots=(str(folder / "all"),), names_folder=str(folder / "names"))
        self.house, self.keys, self.replica = house, digests, ScriptedReplica("r0")
        self.store = BatchStore(folder / "batches", max_bytes=1 << 30)
        self.service = house.service(
            tokenizer, batches=self.store, adapters=Adapters(adapters, model=NAME), max_file_bytes=MOST_BYTES,
            registry=self.emitter.registry,
        )  # fmt: skip
        self.app = make_app(self.service, keys=digests)
        self.http = client_of(self.app)

    async def ask(self, key: str, path: str, *, method: str = "POST", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **options)

    async def get(self, key: str, path: str) -> httpx.Response:
        return await self.ask(key, path, method="GET")

    async def upload(self, key: str, content: bytes, filename: str = "in.jsonl") -> httpx.Response:
        return await self.ask(key, "/v1/files", content=form(content, filename), headers=FORM)

    async def begin(self, key: str, content: bytes) -> str:
        """The id of a batch of the lines of ``content``."""
        file_id = (await self.upload(key, content)).json()["id"]
        wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        return str((await self.ask(key, "/v1/batches", json=wanted)).json()["id"])

    def used(self, id: str) -> dict[str, float]:
        [key] = [key for key in self.quotas.keys.by_name.values() if key.id == id]
        return {kind: self.quotas.used(key.name, kind) for kind in KINDS}


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def form(content: bytes, filename: str = "in.jsonl") -> bytes:
    purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + filename.encode() + b'"\r\n\r\n'
    return purpose + head + content + b"\r\n--x--\r\n"


@pytest.fixture
async def served(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    for name in ("LOOK_S", "KEEP_S", "FIRST_WAIT_S"):
        monkeypatch.setattr(runners, name, 0.02)
    async with House() as house:
        served = Served(house, tokenizer, tmp_path, ENTRIES)
        await house.ready(served.replica)
        yield served
        served.replica.hold.set()
        served.service.background.stop()
        served.service.streams.stop()
        await served.http.aclose()


async def test_class_16_a_prompt_counts_whole_though_its_client_left(served: Served) -> None:
    served.replica.hold.clear()
    asking = asyncio.create_task(served.ask(FEW, TEXT, json={"prompt": [7] * 90, "max_tokens": 4}))
    await until_async(lambda: len(served.replica.requests) == 1)
    asking.cancel()
    await asyncio.wait([asking])
    assert served.used("few")["input_tokens"] == 90
    assert (await served.ask(FEW, TEXT, json={"prompt": [8] * 90, "max_tokens": 4})).status_code == 429


async def test_class_16_lines_of_a_batch_wait_for_their_keys_tokens(served: Served) -> None:
    watch = Lines()
    batch_id = await served.begin(FEW, jsonl([line(number, f"Number {number}") for number in range(6)]))
    async with running(runner_of(served.service, watch, served.keys)):
        await until_async(lambda: watch.ran["repeated"] > 5)
        sent = sum(len(each.token_ids) for each in served.replica.requests)
        assert 0 < sent == served.used("few")["input_tokens"] <= 100
        assert (await served.get(FEW, f"/v1/batches/{batch_id}")).json()["status"] == "in_progress"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((f"weight: {value}", "0.weight") for value in ("-1", "0", ".inf", ".nan", "1e+9")),
        *((f"limits: {{requests: {value}}}", "limits.requests") for value in ("-1", "0", "1.5", ".inf", ".nan")),
        ("tenant: <b>bulk</b>", "0.tenant"),
        ("tenant: !!python/object/apply:os.system ['touch RAN']", "is no YAML"),
        ("tenant: !!python/name:os.system", "is no YAML"),
    ],
)
def test_classes_17_and_18_an_entry_with_such_a_value_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = TenantKeys.read(written(tmp_path / "keys.yaml", ENTRIES))
    Path("keys.yaml").write_text(f"- {{id: a, sha256: {'a' * 64}, {text}}}\n")
    with pytest.raises(InvalidConfig, match=why):
        TenantKeys.read("keys.yaml")
    keys.refresh()
    assert (why in keys.error, len(keys.by_name)) == (True, len(ENTRIES))
    assert not Path("RAN").exists()


IDS = [
    "0", "-1:1.1.00000000", "1:1.1", "1:1.1.0000000g", "1:1.1.00000000,1.1.00000000", "1:1.1.00000000+1@9.0.0",
    "9999999999:1.1.00000000", "1:1.1.00000000' OR 1=1", "*", "x" * 10_000,
]  # fmt: skip
OPENINGS = ["", "0", "1.1.1", "-1.0123456789abcdef.1", "1.0123456789ABCDEF.1", "1.0123456789abcdef.1.1",
            "1.0123456789abcdef.99999999999999999999"]  # fmt: skip


async def test_class_20_forged_ids_of_events_and_openings_run_nothing(served: Served) -> None:
    forged = [{"last-event-id": each, "x-manta-resume": "1.0123456789abcdef.1"} for each in IDS]
    forged += [{"last-event-id": "1:1.1.00000000", "x-manta-resume": each} for each in OPENINGS]
    for headers in forged:
        answer = await served.ask(ONE, TEXT, json={"prompt": "x", "max_tokens": 4, "stream": True}, headers=headers)
        assert answer.status_code == 400, headers
    assert served.replica.requests == []
    right = {"last-event-id": "1:1.3.00000000", "x-manta-resume": "1.0123456789abcdef.1"}  # but for its checksum
    answer = await served.ask(ONE, TEXT, json={"prompt": "x", "max_tokens": 4, "stream": True}, headers=right)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_gone")


async def test_class_23_responses_in_the_background_count_as_choices_of_their_key(served: Served) -> None:
    served.replica.hold.clear()
    body = {"input": "x", "background": True, "max_output_tokens": 16}
    answers = [await served.ask(EIGHT, "/v1/responses", json=body) for _ in range(14)]
    assert [answer.status_code for answer in answers] == [200] * 8 + [429] * 6


GETS_TOO = {"/flush_cache", "/v1/files", "/v1/files/{file_id}", "/v1/batches", "/v1/responses/{response_id}"}


async def test_class_30_no_get_does_what_a_post_does(served: Served) -> None:
    """Those of GETS_TOO only read; /flush_cache has its own test of pages (test_http_browsers.py)."""
    routes = served.app.openapi()["paths"]
    changing = {path for path, methods in routes.items() if {"post", "delete", "put", "patch"} & methods.keys()}
    assert {path for path in changing if "get" in routes[path]} == GETS_TOO
    assert len(changing) > 30
    for path in changing - GETS_TOO:
        for method in ("GET", "HEAD"):
            answer = await served.ask(CHIEF, path.replace("{", "").replace("}", ""), method=method)
            assert answer.status_code in (404, 405), path


NAMES = ["../../etc/passwd", "/etc/passwd", "a\0b", "<script>alert(1)</script>", "..", "", "x" * 8_000, "'; --"]


async def test_class_31_the_name_of_a_file_is_text_and_its_name_on_disk_ours(served: Served) -> None:
    before = {path for path in served.store.folder.parent.rglob("*") if path.parent.name != "files"}
    for name in NAMES:
        file = (await served.upload(ONE, b"{}", name)).json()
        assert file["filename"] == (name or "file")[:512]
        assert served.store.path(file["id"]).read_bytes() == b"{}"
        content = await served.get(ONE, f"/v1/files/{file['id']}/content")
        assert content.headers["content-type"] == "application/octet-stream"
        assert "content-disposition" not in content.headers
    assert {path for path in served.store.folder.parent.rglob("*") if path.parent.name != "files"} == before
    crlf = await served.upload(ONE, b"{}", "a\r\nSet-Cookie: b=c")
    assert "set-cookie" not in (await served.get(ONE, f"/v1/files/{crlf.json()['id']}/content")).headers


GUESSED = ["..", "%2e%2e", "..%2fkeys.yaml", "%2fetc%2fpasswd", "file-%00", "'", "' OR '1'='1", "%", "_" * 29, "*"]


async def test_class_32_a_guessed_id_is_not_there(served: Served) -> None:
    mine = (await served.upload(ONE, b"{}")).json()["id"]
    for guess in (*GUESSED, mine[:-1], mine.upper(), mine + "%00"):
        for method, path in (
            ("GET", f"/v1/files/{guess}"), ("GET", f"/v1/files/{guess}/content"), ("DELETE", f"/v1/files/{guess}"),
            ("GET", f"/v1/batches/{guess}"), ("POST", f"/v1/batches/{guess}/cancel"),
            ("GET", f"/v1/responses/{guess}"), ("GET", f"/v1/streams/{guess}"),
        ):  # fmt: skip
            answer = await served.ask(ONE, path, method=method)
            assert answer.status_code in (404, 405), (method, path)  # 405: its dots led to the list
    assert (await served.get(ONE, f"/v1/files/{mine}")).status_code == 200


async def test_class_33_no_page_begins_behind_anothers_file_and_no_admin_reads_it(served: Served) -> None:
    batch_id = await served.begin(ONE, jsonl([line(0)]))
    file_id = (await served.get(ONE, "/v1/files")).json()["data"][0]["id"]
    for key in (OTHER, CHIEF):
        await served.upload(key, b"{}")
        assert (await served.get(key, f"/v1/files?after={file_id}&order=asc")).json()["data"] == []
        assert (await served.get(key, f"/v1/batches?after={batch_id}")).json()["data"] == []
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
            assert (await served.get(key, path)).status_code == 404
        assert (await served.ask(key, f"/v1/files/{file_id}", method="DELETE")).status_code == 404


HEAD = "multipart/form-data; boundary="


@pytest.mark.parametrize(
    ("status", "content", "headers"),
    [
        (413, form(b"x" * (MOST_BYTES + 1)), FORM),
        (413, form(b"x" * (MOST_BYTES + 1)), {**FORM, "Content-Length": str(10 << 30)}),
        (400, b"--x\r\nX: " + b"a" * 120_000 + b"\r\n\r\n", FORM),
        *((400, form(b"{}"), {"Content-Type": each}) for each in (HEAD[:-10], HEAD, HEAD + "x" * 71, HEAD + "y")),
        *((400, each, FORM) for each in (form(b"{}")[:-9], b"--x\r\n\r\nno name\r\n--x--", b"", b"--x")),
        (400, form(b"{}")[:-5] + form(b"{}")[2:], FORM),  # two files
    ],
)  # fmt: skip
async def test_classes_34_and_35_a_form_that_is_too_long_or_none_is_refused_and_leaves_nothing(
    served: Served, status: int, content: bytes, headers: dict[str, str]
) -> None:
    answer = await served.ask(ONE, "/v1/files", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert list((served.store.folder / "files").iterdir()) == []


async def test_class_42_a_key_has_two_upload_slots_and_all_keys_eight(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MOST_UPLOADS", 3)
    go = asyncio.Event()

    def slowly(key: str) -> "asyncio.Task[httpx.Response]":
        async def content() -> AsyncIterator[bytes]:
            yield form(b"{}")[:60]
            await go.wait()
            yield form(b"{}")[60:]

        return asyncio.create_task(served.ask(key, "/v1/files", content=content(), headers=FORM))

    slow = [slowly(ONE), slowly(ONE)]
    await until_async(lambda: uploads._uploads.total() == 2)
    refused = await served.upload(ONE, b"{}")
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert (await served.upload(OTHER, b"{}")).status_code == 200
    slow.append(slowly(OTHER))
    await until_async(lambda: uploads._uploads.total() == 3)
    assert (await served.upload(CHIEF, b"{}")).status_code == 429  # all places are taken
    slow.pop().cancel()
    await until_async(lambda: uploads._uploads.total() == 2)
    assert (await served.upload(CHIEF, b"{}")).status_code == 200
    go.set()
    assert [(await each).status_code for each in slow] == [200, 200]
    assert (await served.upload(ONE, b"{}")).status_code == 200
    assert uploads._uploads.total() == 0


class Bomb:
    """Pickled: a call that leaves a folder."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("ran",)


async def test_class_45_a_pickle_in_an_adapters_folder_does_not_run_and_no_message_has_bytes_of_a_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bomb = tmp_path / "all" / "a", pickle.dumps(Bomb())
    make_adapter(folder, Path(MODEL), rank=1, targets=("q_proj",))
    monkeypatch.chdir(tmp_path)
    for name, content in ((WEIGHTS, bomb), (WEIGHTS, b"PK\3\4" + bomb), (CONFIG, bomb), ("adapter_model.bin", bomb)):
        (folder / name).write_bytes(content)
        answer = await served.ask(CHIEF, "/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": "a"})
        assert answer.status_code == 400, answer.text
        assert ("mkdir" in answer.text, str(tmp_path) in answer.text) == (False, False)
    assert not Path("ran").exists()


async def test_class_55_no_address_that_a_client_gives_is_asked(served: Served) -> None:
    asked = list[str]()

    async def victim(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with listening(victim) as port:
        url = f"http://127.0.0.1:{port}/secret"
        image, audio = {"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {}}
        for path, body in [
            *((CHAT, {"messages": [{"role": "user", "content": [part]}]}) for part in (image, audio)),
            (TEXT, {"prompt": "x", "guided_json": {"$ref": url}}),
            (TEXT, {"prompt": "x", "json_schema": {"$schema": url, "$ref": f"{url}#/a"}}),
            (TEXT, {"prompt": "x", "lora_path": url}),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": url}),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "somebody/on-the-hub"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 1, "mcp_servers": [{"type": "url", "url": url}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
            ("/v1/batches", {"input_file_id": url, "endpoint": url, "completion_window": "24h"}),
        ]:  # fmt: skip
            answer = await served.ask(CHIEF, path, json=body)
            assert answer.status_code == 400, (path, body, answer.text)
        assert asked == []


async def test_class_58_what_a_client_writes_stands_in_no_metric_and_no_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "httpx")  # the client
    mark = "mark-of-a-stranger"
    headers = {"x-manta-session": mark, "User-Agent": mark, "Referer": mark, "x-forwarded-for": mark}
    for number in range(150):
        body = {"prompt": f"{mark} {number}", "max_tokens": 1, "user": mark, "metadata": {mark: mark}}
        await served.ask(ONE, TEXT, json={**body, "model": f"{mark}-{number}"}, headers=headers)
        await served.ask(ONE, f"/{mark}/{number}", json=body)
    assert (await served.ask(ONE, TEXT, json=body, headers=headers)).status_code == 200
    before = (await served.get(CHIEF, "/metrics")).text
    assert mark not in before
    assert "manta_requests_total" in before
    assert Scraped(served.emitter.registry).total("requests_total") == 151
    assert mark not in caplog.text
