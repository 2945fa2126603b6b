"""Names of adapters: what they stand for, by the settings and over HTTP, after a reload too, and what requests get."""

import asyncio
import errno
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.__main__ import main
from deployments.http.http_app import make_app
from deployments.http.service import adaptable_weights
from deployments.record import route_log
from deployments.replica.feasible import impossible
from deployments.settings import adapters as adapters_module
from deployments.settings.adapters import Adapters, FileThread
from deployments.settings.groups import AdapterSettings
from deployments.settings.schema import ModelSettings, parse
from deployments.tenancy.keys import NO_KEYS, KeyDigests, read_keys
from replicas.checkpoints import adapters as checkpoints
from replicas.checkpoints.adapters import CONFIG, WEIGHTS
from replicas.errors import AdapterNotReadable, InvalidAdapter, InvalidConfig, InvalidRequest, Overloaded, UnknownModel
from replicas.text.tokenizer import Tokenizer
from replicas.types import AdapterRef, AdapterStats
from tests.adapters import make_adapter
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of, listening
from tests.unit.deployments.test_quotas import entry
from tests.waiting import until_async

pytestmark = pytest.mark.model
BASE = "SmolLM2-135M-Instruct"
ADMIN, KEY = "key-of-the-admin-of-all", "key-of-one-of-the-tenants"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def adapter(folder: Path, seed: int = 0) -> AdapterRef:
    return make_adapter(folder, Path(MODEL), rank=1, targets=("q_proj",), seed=seed)


def settings(root: Path, **more: Any) -> AdapterSettings:
    return AdapterSettings(roots=(str(root / "all"),), names_folder=str(root / "names"), **more)


def load(adapters: Adapters, name: str, path: str, *, in_place: bool = False) -> AdapterRef:
    return adapters.load(name, path, in_place=in_place)


def test_a_name_stands_for_what_its_folder_held_when_it_was_given_at_every_router(tmp_path: Path) -> None:
    first = adapter(tmp_path / "all" / "a")
    one, other = Adapters(settings(tmp_path)), Adapters(settings(tmp_path))
    assert one.find("poet") is other.find("poet") is None
    assert load(one, "poet", "a") == first == one.find("poet") == other.find("poet")
    second = adapter(tmp_path / "all" / "a", seed=1)
    assert one.find("poet") == first != second
    assert load(other, "poet", str(tmp_path / "all" / "a"), in_place=True) == second
    assert one.find("poet") == other.find("poet") == Adapters(settings(tmp_path)).find("poet") == second
    one.unload("poet")
    assert other.find("poet") is None
    assert list(other.all()) == []
    with pytest.raises(UnknownModel, match="the adapter 'poet' cannot be found"):
        other.unload("poet")


def test_a_name_that_is_taken_is_given_again_only_in_place(tmp_path: Path) -> None:
    fixed = adapter(tmp_path / "fixed")
    for name in "ab":
        adapter(tmp_path / "all" / name)
    adapters = Adapters(settings(tmp_path, names={"fixed": str(tmp_path / "fixed")}), model=BASE)
    load(adapters, "poet", "a")
    with pytest.raises(InvalidRequest, match="'poet' has already been loaded; to replace it, set load_inplace"):
        load(adapters, "poet", "b")
    for name in ("fixed", BASE):
        with pytest.raises(InvalidRequest, match="stands in the settings"):
            load(adapters, name, "a", in_place=True)
    with pytest.raises(InvalidRequest, match="stands in the settings"):
        adapters.unload("fixed")
    assert [each.name for each in adapters.all()] == ["fixed", "poet"]
    assert adapters.find("fixed") == fixed
    assert os.listdir(tmp_path / "names") == ["poet.json"]


def test_a_name_is_one_file_in_the_folder_whatever_it_looks_like(tmp_path: Path) -> None:
    ref = adapter(tmp_path / "all" / "a")
    adapters, names = Adapters(settings(tmp_path)), [".a/..b", "a/b", "a/" * 61 + "x" * 6, "a@b=c+d"]
    for name in names:
        assert load(adapters, name, "a") == ref == adapters.find(name)
    assert len(os.listdir(tmp_path / "names")) == len(names)
    assert [each.name for each in Adapters(settings(tmp_path)).all()] == sorted(names)
    with pytest.raises(InvalidRequest, match="must match"):
        load(adapters, "%2e", "a")
    for asks in (lambda name: load(adapters, name, "a"), adapters.unload):
        with pytest.raises(InvalidRequest, match="makes a file's name of 257 characters; at most 255"):
            asks("a/" * 62 + "x" * 4)
    assert adapters.find("a/" * 62 + "x" * 4) is None


@pytest.mark.parametrize("kind", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_names_are_kept_where_the_file_system_has_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr(os, "link", refused)
    ref = adapter(tmp_path / "all" / "a")
    adapters = Adapters(settings(tmp_path))
    assert load(adapters, "poet", "a") == ref == adapters.find("poet")
    with pytest.raises(InvalidRequest, match="'poet' has already been loaded"):
        load(adapters, "poet", "a")
    assert os.listdir(tmp_path / "names") == ["poet.json"]


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    adapter(tmp_path / "all" / "a")
    adapters, limits = Adapters(settings(tmp_path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # no file gets longer, as on a full disk
    try:
        with pytest.raises(Overloaded, match=r"names_folder cannot be written \(File too large\)"):
            load(adapters, "poet", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path / "names") == []


def test_a_name_that_is_the_models_by_now_is_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        adapter(tmp_path / "all" / name)
        load(Adapters(settings(tmp_path)), name, name)
    adapters = Adapters(settings(tmp_path), model="a")
    assert [each.name for each in adapters.all()] == ["b"]
    assert adapters.find("a") is None
    [told] = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "adapter a: its file" in told
    assert "it has the name of the model" in told


def test_nothing_outside_the_roots_is_loaded_by_whatever_path_or_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "all", tmp_path / "outside"
    adapter(outside)
    adapter(root / "inside")
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    (root / "files" / CONFIG).symlink_to(root / "inside" / CONFIG)
    (root / "files" / WEIGHTS).symlink_to(outside / WEIGHTS)
    adapters = Adapters(settings(tmp_path))
    for path in (str(outside), "../outside", "inside/../../outside", "link", "files", "none", "a\0b", "", "/", "~"):
        with pytest.raises(InvalidAdapter, match=r"lora_path: |holds no|has no"):
            load(adapters, "poet", path)
    assert adapters.find("poet") is None
    (root / "files" / WEIGHTS).unlink()
    (root / "files" / WEIGHTS).symlink_to(root / "inside" / WEIGHTS)  # as a hub's cache has them
    assert load(adapters, "poet", "files") == adapters.find("poet")
    (tmp_path / "names" / "evil.json").write_text(json.dumps({"identity": "0" * 64, "path": str(outside)}))
    (tmp_path / "names" / "broken.json").write_text("{")
    assert [each.name for each in adapters.all()] == ["poet"]


def test_a_name_is_known_again_after_a_passing_error_which_the_log_has_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = adapter(tmp_path / "all" / "a")
    load(Adapters(settings(tmp_path)), "poet", "a")
    adapters = Adapters(settings(tmp_path))
    for _ in range(2):
        caplog.clear()
        (tmp_path / "all").rename(tmp_path / "away")  # as a mount that is not there yet
        for _ in range(3):
            assert adapters.find("poet") is None
        (tmp_path / "away").rename(tmp_path / "all")
        assert [each.levelname for each in caplog.records] == ["ERROR"]
        assert "is no folder below adapters.roots" in caplog.text
        assert adapters.find("poet") == ref
        os.utime(tmp_path / "names" / "poet.json", ns=(0, 0))  # so that it is read again


def test_an_adapter_of_another_model_is_refused_when_it_is_named(tmp_path: Path) -> None:
    """By the shapes of what it adds to. The model that it says it was made for only stands in the message."""
    fits = adaptable_weights(ModelSettings(path=MODEL))
    adapters = Adapters(settings(tmp_path), fits=fits)
    make_adapter(tmp_path / "all" / "fine", Path(MODEL), base_model_name_or_path="somebody/else")
    load(adapters, "fine", "fine")
    config = json.loads(Path(MODEL, "config.json").read_text())
    others = {
        "narrow": ({"hidden_size": 288}, r"model.layers.0.mlp.down_proj as \(288, 1536\) \(out, in\), this model as"),
        "deep": ({"num_hidden_layers": 31}, r"model.layers.30.mlp.down_proj \(7 in all\) cannot be changed"),
    }
    for name, (changes, said) in others.items():
        (tmp_path / name).mkdir()
        Path(tmp_path, name, "config.json").write_text(json.dumps(config | changes))
        make_adapter(tmp_path / "all" / name, tmp_path / name)
        with pytest.raises(InvalidAdapter, match=rf"{said}.*made for '{name}'"):
            load(adapters, name, name)
        assert adapters.find(name) is None
        names = {"names": {name: str(tmp_path / "all" / name)}}
        [problem] = impossible(parse({"model": {"path": MODEL}, "adapters": names}))
        assert re.match(rf"adapters.names.{name} = .*{said}", problem)
    with pytest.raises(InvalidAdapter, match="no layer of it can"):
        load(Adapters(settings(tmp_path), fits={}), "other", "fine")


def test_what_the_settings_name_is_looked_at_when_a_router_starts(tmp_path: Path) -> None:
    ref = adapter(tmp_path / "a")
    assert Adapters(AdapterSettings(names={"poet": str(tmp_path / "a")})).find("poet") == ref
    with pytest.raises(InvalidConfig, match=r"adapters.names.poet = '/none': adapter: none has no adapter_config.json"):
        Adapters(AdapterSettings(names={"poet": "/none"}))
    (tmp_path / "a" / CONFIG).unlink()
    (tmp_path / "a" / CONFIG).symlink_to("/proc/self/mem")  # as of a disk with a fault
    with pytest.raises(InvalidConfig, match=r"adapters.names.poet = .* cannot be read: "):
        Adapters(AdapterSettings(names={"poet": str(tmp_path / "a")}))
    with pytest.raises(InvalidConfig, match=r"adapters.max_rank: must be at least 1"):
        parse({"model": {"path": MODEL}, "adapters": {"max_rank": 0}})
    with pytest.raises(InvalidConfig, match="is the name of the model"):
        parse({"model": {"path": MODEL}, "adapters": {"names": {BASE: str(tmp_path / "a")}}})
    with pytest.raises(InvalidConfig, match="roots and names_folder belong together"):
        parse({"model": {"path": MODEL}, "adapters": {"roots": ["/x"]}})


class Client:
    """HTTP to a router with one scripted replica, and adapters below ``root``."""

    def __init__(self, house: House, tokenizer: Tokenizer, root: Path, keys: KeyDigests = NO_KEYS) -> None:
        self.replica, self.root = ScriptedReplica("a"), root
        self.adapters = Adapters(settings(root), model=BASE)
        self.app = make_app(house.service(tokenizer, adapters=self.adapters), keys=keys)
        self.http = client_of(self.app)

    async def asked(self, path: str = "/v1/chat/completions", **body: Any) -> tuple[dict[str, Any], AdapterRef | None]:
        """The answer, and the adapter of the request that the replica got."""
        answer = await self.http.post(path, json={**(CHAT if "chat" in path else {}), **body})
        assert answer.status_code == 200, answer.text
        return answer.json(), self.replica.requests[-1].adapter

    async def error(self, path: str = "/v1/chat/completions", status: int = 400, **body: Any) -> str:
        num_before = len(self.replica.requests)
        answer = await self.http.post(path, json={**(CHAT if "chat" in path else {}), **body})
        assert answer.status_code == status, answer.text
        assert len(self.replica.requests) == num_before
        return str(answer.json()["error"]["message"])


@pytest.fixture
async def web(house: House, tokenizer: Tokenizer, tmp_path: Path) -> Client:
    web = Client(house, tokenizer, tmp_path)
    await house.ready(web.replica)
    return web


async def test_a_request_gets_the_adapter_that_it_names_and_its_answer_says_so(web: Client) -> None:
    ref = adapter(web.root / "all" / "a")
    loaded = await web.http.post("/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": "a"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    for named in ({"model": "poet"}, {"model": f"{BASE}:poet"}, {"lora_path": "poet"}, {"lora_path": ref.path},
                  {"model": BASE, "lora_path": "poet"}, {"model": "poet", "lora_path": ref.path}):  # fmt: skip
        body, got = await web.asked(**named)
        assert (body["model"], got, got and got.name) == ("poet", ref, "poet"), named
    for plain in ({}, {"model": BASE}, {"model": ""}, {"lora_path": None}, {"lora_path": ""}):
        body, got = await web.asked(**plain)
        assert (body["model"], got) == (BASE, None), plain
    for path, asks in {
        "/v1/completions": {"prompt": "x", "model": "poet"},
        "/v1/responses": {"input": "x", "model": "poet", "max_output_tokens": 2},
        "/v1/messages": {**CHAT, "model": "poet"},
        "/api/generate": {"prompt": "x", "lora_path": "poet", "stream": False, "options": {"num_predict": 2}},
        "/api/chat": {**CHAT, "model": "poet", "stream": False, "options": {"num_predict": 2}},
    }.items():
        body, got = await web.asked(path, **asks)
        assert (body["model"], got) == ("poet", ref), path
    for path, asks in {
        "/generate": {"text": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v1/score": {"query": "x", "items": ["y"], "label_token_ids": [1]},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
        "/api/chat": {**CHAT, "options": {"num_predict": 2}},
    }.items():
        for named in ({"lora_path": "poet"}, {"model": "poet"}, {"model": f"{BASE}:poet"}):
            num_before = len(web.replica.requests)
            answer = await web.http.post(path, json=asks | named)
            assert [each.adapter for each in web.replica.requests[num_before:]] == [ref], (path, named, answer.text)
    await web.http.post("/generate", json={"text": ["x", "y"], "lora_path": ["poet", None]})
    assert {each.adapter for each in web.replica.requests[-2:]} == {ref, None}


async def test_a_name_that_is_not_known_is_never_answered_by_the_model(web: Client) -> None:
    assert "served: 'SmolLM2-135M-Instruct', and the adapters that GET /v1/models lists" in await web.error(
        status=404, model="poet"
    )
    for named in ("poet:x", f"{BASE}:", f"{BASE}:poet", f"{BASE}:{BASE}", "POET"):
        await web.error(status=404, model=named)
    assert await web.error(lora_path="poet") == "lora_path: 'poet' is not loaded here"
    assert await web.error("/generate", text="x", lora_path=["poet"]) == "lora_path: 'poet' is not loaded here"
    assert "lora_path" in await web.error("/v1/messages", **CHAT, model=BASE, lora_path="poet")
    for name in "ab":
        adapter(web.root / "all" / name, seed=ord(name))
        load(web.adapters, name, name)
    assert "is another adapter than that of model, 'a'" in await web.error(model="a", lora_path="b")


async def test_pages_of_a_request_are_named_by_the_adapter_that_it_had_when_it_came(web: Client) -> None:
    first = adapter(web.root / "all" / "a")
    load(web.adapters, "poet", "a")
    await web.asked(model="poet", cache_salt="salt")
    adapter(web.root / "all" / "a", seed=1)
    reloaded = await web.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "poet", "lora_path": "a", "load_inplace": True}
    )
    assert reloaded.status_code == 200
    await web.asked(model="poet", cache_salt="salt")
    before, after = [each.namespace for each in web.replica.requests]
    assert before == f"\1{first.identity}\1salt" != after
    assert re.fullmatch("\1[0-9a-f]{64}\1salt", after)
    assert "U+0000" in await web.error(cache_salt=before)  # nobody asks for another's pages by a salt


async def test_a_dry_run_counts_the_load_of_an_adapter_as_the_request_itself(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with House(policy="estimated_ttft") as house:
        web, holder = Client(house, tokenizer, tmp_path), ScriptedReplica("b")
        ref = adapter(tmp_path / "all" / "a")
        load(web.adapters, "poet", "a")
        for replica, held in ((web.replica, ()), (holder, (ref.identity,))):
            adapters = AdapterStats(held=held, num_bytes=0, num_loads=1, num_dropped=0, load_s=0.5)
            replica.stats = replace(replica.stats, adapters=adapters)
        await house.ready(web.replica, holder)

        def load_s(decision: dict[str, Any]) -> dict[str, float]:
            return {each["replica"]: each["adapter_s"] for each in decision["candidates"]}

        for named in ({"model": "poet"}, {"model": f"{BASE}:poet"}, {"lora_path": "poet"}, {"lora_path": ref.path}):
            dry = (await web.http.post("/route/explain", json={"prompt": "x", **named})).json()
            assert (dry["replica"], load_s(dry)) == ("b", {"a": 0.5, "b": 0.0}), named
        await web.http.post("/v1/completions", json={"prompt": "x", "model": "poet"}, headers={"X-Request-Id": "poem"})
        told = (await web.http.get("/route/poem")).json()["tries"][0]
        assert (told["replica"], load_s(told)) == ("b", {"a": 0.5, "b": 0.0})
        plain = (await web.http.post("/route/explain", json={"prompt": "x", "model": BASE})).json()
        assert load_s(plain) == {"a": 0.0, "b": 0.0}
        for named, status in (({"model": "none"}, 404), ({"lora_path": "none"}, 400)):
            assert (await web.http.post("/route/explain", json={"prompt": "x", **named})).status_code == status


async def test_manta_adapters_lists_loads_and_unloads(
    house: House, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys = read_keys(api_key_file=None, admin_key=ADMIN, environ={"MANTA_API_KEYS": KEY})
    web = Client(house, tokenizer, tmp_path, keys)
    refs = [adapter(tmp_path / "all" / name, seed=ord(name)) for name in "ab"]
    held = AdapterStats(held=(refs[0].identity,), num_bytes=0, num_loads=1, num_dropped=0, load_s=0.5)
    web.replica.stats = replace(web.replica.stats, adapters=held)
    await house.ready(web.replica)
    async with listening(web.app) as port:

        async def manta(*words: str, key: str = ADMIN) -> tuple[int, str, str]:
            monkeypatch.setenv("MANTA_ADMIN_KEY", key)
            status = await asyncio.to_thread(main, ["adapters", *words, "--url", f"http://127.0.0.1:{port}"])
            told = capsys.readouterr()
            return status, told.out, told.err

        assert await manta() == (0, "no adapter has a name: see docs/adapters.md\n", "")
        status, out, _ = await manta("load", "poet", "a")
        assert (status, out.splitlines()[1].split()) == (
            0, ["poet", refs[0].identity[:12], "1", "138k", "0", "a", refs[0].path]
        )  # fmt: skip
        web.http.headers["authorization"] = f"Bearer {KEY}"
        await web.asked("/v1/completions", prompt="x", model="poet")
        status, out, _ = await manta("--json")
        [row] = json.loads(out)["adapters"]
        assert (row["requests"], row["replicas"], row["bytes"]) == (1, ["a"], 4 * 30 * 2 * 576)
        monkeypatch.setattr(route_log, "MOST_ADAPTERS", 1)
        await manta("load", "late", "b")
        assert [row["requests"] for row in json.loads((await manta("--json"))[1])["adapters"]] == [None, 1]
        assert (await manta("unload", "late"))[0] == 0
        status, _, err = await manta("load", "poet", "b")
        assert (status, "set load_inplace to true" in err) == (1, True)
        status, out, _ = await manta("load", "poet", "b", "--replace")
        assert (status, refs[1].identity[:12] in out) == (0, True)
        assert (await manta("unload", "poet"))[:2] == (0, "no adapter has a name: see docs/adapters.md\n")
        status, _, err = await manta("unload", "poet")
        assert (status, "the adapter 'poet' cannot be found" in err) == (1, True)
        status, _, err = await manta(key=KEY)
        assert (status, "the admin key is wrong" in err) == (4, True)
    for words, wanted in ((["load", "poet"], "NAME FOLDER"), (["unload"], "NAME"), (["list", "poet"], "no name")):
        with pytest.raises(SystemExit):
            main(["adapters", *words])
        assert f"adapters {words[0]} needs {wanted}:" in capsys.readouterr().err


async def test_vllms_and_sglangs_forms_of_loading(web: Client) -> None:
    ref = adapter(web.root / "all" / "a")
    asks = {"lora_name": "poet", "lora_path": ref.path}
    answer = await web.http.post("/load_lora_adapter", json=asks)
    assert answer.json() == {"success": True, "loaded_adapters": {"poet": ref.path}}
    assert "has already been loaded" in await web.error("/v1/load_lora_adapter", **asks)
    assert "is no folder below adapters.roots" in await web.error(
        "/v1/load_lora_adapter", lora_name="b", lora_path="/etc"
    )
    assert await web.error("/load_lora_adapter", **asks, pinned=True) == (
        "pinned: is not supported by this server; leave it out"
    )
    models = (await web.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"]) for each in models] == [(BASE, None), ("poet", BASE)]
    assert (await web.http.get("/v1/models/poet")).json() == models[1]
    assert models[1]["root"] == ref.path
    assert [each["name"] for each in (await web.http.get("/api/tags")).json()["models"]] == [BASE, "poet"]
    answer = await web.http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert "cannot be found" in await web.error("/unload_lora_adapter", 404, lora_name="poet")
    assert (await web.http.get("/v1/models/poet")).status_code == 404


async def test_the_admin_alone_loads_and_a_tenant_has_the_adapters_of_its_list(
    house: House, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "keys.yaml").write_text(json.dumps([entry(KEY, "one", models=[BASE, "mine"])]))
    keys = read_keys(api_key_file=None, admin_key=ADMIN, keys_file=str(tmp_path / "keys.yaml"), environ={})
    web = Client(house, tokenizer, tmp_path, keys)
    await house.ready(web.replica)
    for name in ("mine", "theirs"):
        adapter(tmp_path / "all" / name, seed=len(name))
    web.http.headers["authorization"] = f"Bearer {KEY}"
    asks = {"lora_name": "mine", "lora_path": "mine"}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"):
        assert "the admin key is asked for" in await web.error(path, 401, **asks)
    for name in ("mine", "theirs"):
        load(web.adapters, name, name)
    _, got = await web.asked(model="mine")
    assert got == web.adapters.find("mine")
    await _nothing_tells_apart(web, "theirs", "none")
    listed = (await web.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == [BASE, "mine"]
    assert (await web.http.get("/v1/models/theirs")).status_code == 404


async def _nothing_tells_apart(web: Client, theirs: str, none: str) -> None:
    """What another tenant may use answers as what is not there, but for the name that was asked for."""
    folder, num_before = str(web.root / "all"), len(web.replica.requests)
    for path, asks in {
        "/v1/chat/completions": CHAT,
        "/generate": {"text": "x"},
        "/v1/embeddings": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/v1/score": {"query": "x", "items": ["y"], "label_token_ids": [1]},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
        "/api/chat": CHAT,
        "/api/generate": {"prompt": "x"},
    }.items():
        for field, form in {
            "model": "{}",
            "model ": f"{BASE}:{{}}",
            "lora_path": "{}",
            "lora_path ": f"{folder}/{{}}",
        }.items():
            if path == "/tokenize" and "lora" in field:
                continue
            told = [
                await web.http.post(path, json={**asks, field.strip(): form.format(name)}) for name in (theirs, none)
            ]
            assert told[0].status_code == told[1].status_code == (404 if "model" in field else 400), (path, field)
            assert told[0].text.replace(theirs, none) == told[1].text, (path, field)
        for field, value in {"adapter_id": none, "lora_request": {"name": none}}.items() if path != "/tokenize" else ():
            refused = await web.http.post(path, json={**asks, field: value})
            assert (refused.status_code, f"{field}: " in refused.text) == (400, True), (path, field)
    assert len(web.replica.requests) == num_before


async def test_a_folder_is_looked_for_among_the_names_that_the_caller_may_use(
    house: House, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = "key-of-another-of-the-tenants"
    entries = [entry(KEY, "one", models=[BASE, "new", "same"]), entry(other, "two", models=[BASE, "old", "new"])]
    (tmp_path / "keys.yaml").write_text(json.dumps(entries))
    web = Client(house, tokenizer, tmp_path, read_keys(
        api_key_file=None, admin_key=ADMIN, keys_file=str(tmp_path / "keys.yaml"), environ={}
    ))  # fmt: skip
    await house.ready(web.replica)
    old = adapter(tmp_path / "all" / "a")
    load(web.adapters, "old", "a")
    adapter(tmp_path / "all" / "a", seed=1)
    new = load(web.adapters, "new", "a")
    assert load(web.adapters, "same", "a").identity == new.identity != old.identity
    web.http.headers["authorization"] = f"Bearer {KEY}"
    for named, got in ((None, new), ("new", new), ("same", web.adapters.find("same"))):
        assert (await web.asked(model=named, lora_path=new.path))[1] == got
    web.http.headers["authorization"] = f"Bearer {other}"
    assert await web.error(lora_path=new.path) == (
        f"lora_path: '{new.path}' has several versions: use a name of new, old"
    )
    assert (await web.asked(model="old", lora_path=new.path))[1] == web.adapters.find("old")
    assert "is another adapter" in await web.error(model="old", lora_path="new")


async def test_files_that_do_not_answer_delay_nothing_but_requests_for_adapters_and_those_only_so_long(
    web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = adapter(web.root / "all" / "a")
    load(Adapters(settings(web.root)), "poet", "a")
    answers, real = threading.Event(), adapters_module.read_own
    monkeypatch.setattr(adapters_module, "read_own", lambda path: answers.wait() and real(path))  # a mount that hangs
    monkeypatch.setattr(web.adapters, "looks", FileThread("adapters", deadline_s=0.3))
    try:
        first = asyncio.create_task(web.http.post("/v1/chat/completions", json={**CHAT, "model": "poet"}))
        await asyncio.sleep(0.05)
        assert (await web.asked())[1] is None
        assert not first.done()
        assert ((await first).status_code, "do not answer: try again later" in (await first).text) == (503, True)
        begun_s = time.monotonic()
        for _ in range(10):
            assert "do not answer" in await web.error(status=503, lora_path=ref.path)
        assert time.monotonic() - begun_s < 10 * 0.3
        assert (await web.asked())[1] is None
    finally:
        answers.set()
    await until_async(lambda: web.adapters.looks.is_free, 5)
    assert (await web.asked(model="poet"))[1] == ref


async def test_256_prompts_look_their_folder_up_once_and_beside_the_event_loop(
    web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        ref = adapter(web.root / "all" / name, seed=ord(name))
        load(web.adapters, name, name)
    listed: list[int] = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(threading.get_ident()) or real(path))
    asks = {"text": ["x"] * 256, "lora_path": ["a", ref.path] * 128, "sampling_params": {"max_new_tokens": 1}}
    answer = await web.http.post("/generate", json=asks)
    assert answer.status_code == 200, answer.text
    assert [each.adapter for each in web.replica.requests].count(ref) == 128
    assert len(listed) == 1
    assert threading.get_ident() not in listed
    for _ in range(20):
        await web.http.post("/generate", json={"text": "x", "lora_path": ref.path})
        await web.http.get("/v1/models")
    assert len(listed) < 20


def test_a_list_of_names_is_as_old_as_a_second_but_for_what_was_changed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one, other = Adapters(settings(tmp_path)), Adapters(settings(tmp_path))
    first = adapter(tmp_path / "all" / "a")
    assert one.all() == other.all() == []
    now_s = 100.1
    load(one, "poet", "a")
    now_s = 100.2
    assert one.all() == one.of_folder(first.path) == [first] == [other.find("poet")]
    assert other.all() == other.of_folder(first.path) == []
    now_s = 101.0
    assert other.all() == other.of_folder(first.path) == [first]
    second = adapter(tmp_path / "all" / "a", seed=1)
    load(one, "poet", "a", in_place=True)
    assert other.of_folder(first.path) == [second]  # a name that was listed stands for what it does now
    now_s = 101.1
    one.unload("poet")
    now_s = 101.2
    assert one.all() == other.of_folder(first.path) == []


async def test_without_a_place_for_names_nothing_is_loaded(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
    assert answer.status_code == 400
    assert "adapters.roots and adapters.names_folder are not set" in answer.json()["error"]["message"]


async def test_a_name_that_could_be_misread_or_reads_as_a_path_or_that_metrics_use_is_refused(web: Client) -> None:
    """Class 46."""
    adapter(web.root / "all" / "a")
    for name in ("", "a b", "x" * 129, "a:b", "a\0", "ü", "a\n", "..", ".", "../../x", "a/../b", "/a", "a/", "/" * 60,
                 "...", "others", "-"):  # fmt: skip
        assert web.adapters.find(name) is None
        assert "lora_name" in await web.error("/v1/load_lora_adapter", lora_name=name, lora_path="a")
        assert not (web.root / "names").exists()
        with pytest.raises(InvalidConfig):
            parse({"model": {"path": MODEL}, "adapters": {"names": {name: str(web.root / "all" / "a")}}})


async def test_a_folder_of_a_long_name_is_refused_in_words(web: Client) -> None:
    """Class 44: 5,000 characters made a 500, and a traceback with all of them."""
    for path in ("x" * 5000, "x/" * 5000, "\0"):
        said = await web.error("/v1/load_lora_adapter", lora_name="poet", lora_path=path)
        assert "is no folder below adapters.roots" in said
        assert len(said) < 400


async def test_weights_that_are_no_numbers_are_refused_when_they_are_loaded_and_no_message_has_the_servers_folder(
    web: Client,
) -> None:
    """Class 45: such an adapter got its name, and each request for it 400 with the server's folder."""
    folder = web.root / "all" / "a"
    adapter(folder)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-4] + b"\0\0\xc0\x7f")  # of an F32
    said = await web.error("/v1/load_lora_adapter", lora_name="poet", lora_path="a")
    assert ("hold NaN or inf" in said, str(web.root) in said) == (True, False)
    (folder / WEIGHTS).write_bytes(whole)
    ref = adapter(folder)
    (folder / WEIGHTS).write_bytes(whole[:-4] + b"\0\0\0\0")
    with pytest.raises(AdapterNotReadable, match="adapter: a has changed") as changed:
        checkpoints.load(folder, ref.identity)
    assert str(web.root) not in str(changed.value)


def test_names_that_others_could_have_written_stand_for_nothing(tmp_path: Path) -> None:
    """Class 64."""
    adapter(tmp_path / "all" / "a")
    adapters = Adapters(settings(tmp_path))
    adapters.load("poet", "a", in_place=False)
    [file] = Path(settings(tmp_path).names_folder or "").glob("*.json")
    assert adapters.find("poet") is not None
    file.chmod(0o666)
    os.utime(file, ns=(1, 1))
    assert adapters.find("poet") is None
    file.chmod(0o600)
    assert adapters.find("poet") is not None
    file.parent.chmod(0o777)
    with pytest.raises(InvalidConfig, match=r"adapters.names_folder: .* can be written by others \(mode 777\)"):
        Adapters(settings(tmp_path))


async def test_a_folder_of_names_that_cannot_be_written_is_told_as_503(web: Client) -> None:
    adapter(web.root / "all" / "a")
    names = Path(settings(web.root).names_folder or "")
    names.mkdir(mode=0o700, exist_ok=True)
    names.rmdir()
    names.write_text("a file in the way")
    assert (await web.error("/v1/load_lora_adapter", 503, lora_name="poet", lora_path="a")).startswith(
        "adapters.names_folder cannot be written (File exists)"
    )
    names.unlink()
    names.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", names], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode()}")
    try:
        said = await web.error("/v1/load_lora_adapter", 503, lora_name="poet", lora_path="a")
        assert said.startswith("adapters.names_folder cannot be written (Read-only file system)")
    finally:
        subprocess.run(["umount", "-l", names], check=True)
