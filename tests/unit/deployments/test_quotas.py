"""Keys with tenants: what their file may hold, its reload, and what a key may use. Replicas are scripted."""

import asyncio
import contextlib
import copy
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.dispatch.progress import Charge, Progress
from deployments.http.http_app import make_app
from deployments.record.rids import owned
from deployments.tenancy import quotas as quotas_module
from deployments.tenancy.keys import read_keys
from deployments.tenancy.quotas import OverQuota, Quotas, Reserved, SoFar, Told
from deployments.tenancy.tenants import KeyLimits, TenantKey, TenantKeys
from deployments.watch.terminal import lists as terminal
from replicas.errors import Fault, InvalidConfig
from replicas.text.tokenizer import Tokenizer
from replicas.types import Finish, FinishReason, TokenDelta, Usage
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import ask
from tests.waiting import until_async

HEAVY, LIGHT, CHIEF = "a-key-of-the-heavy-tenant", "a-key-of-the-light-tenant", "a-key-of-the-chief"
NOW_S = 60_000.0  # a minute begins


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(key: str, id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "sha256": sha(key), **more}


FEW = "a-key-with-few-tokens-a-minute"
ENTRIES = [
    entry(HEAVY, "heavy", tenant="bulk", weight=2.0, highest_priority=3,
          limits={"requests": 4, "output_tokens": 100, "n": 2, "context": 60}),
    entry(LIGHT, "light", models=["another"]),
    entry(CHIEF, "chief", admin=True),
    entry(FEW, "few", limits={"requests": 2, "input_tokens": 60, "choices": 8}),
]  # fmt: skip


def written(path: Path, entries: object) -> str:
    path.write_text(yaml.safe_dump(entries))
    return str(path)


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def key_of(**limits: int) -> TenantKey:
    return TenantKey(id="k", sha256=sha(HEAVY), limits=KeyLimits(**limits))


def quotas_of(clock: Clock | None = None, key: TenantKey | None = None) -> Quotas:
    return Quotas(TenantKeys(by_name={} if key is None else {key.name: key}), clock=clock or Clock())


def reserve(quotas: Quotas, key: TenantKey, output_tokens: int = 1, **more: Any) -> Reserved:
    return quotas.reserve(key, **{"input_tokens": 1, "output_tokens": output_tokens, "choices": 1, **more})


def use(quotas: Quotas, key: TenantKey, num: int = 1) -> None:
    """A request of one token of input that asked for ``num`` of output, and got them."""
    quotas.settle(reserve(quotas, key, num), input_tokens=1, output_tokens=num, choices=1)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "0 keys"),
        ([{"id": "x", "sha256": "12"}], "0.sha256"),
        ([entry(HEAVY, "a b")], "0.id"),
        ([entry(HEAVY, "a", limits={"requests": 0})], "limits.requests"),
        ([entry(HEAVY, "a", limits={"rpm": 5})], "limits.rpm"),

        ([entry(HEAVY, "a", weight=0)], "0.weight"),
        ([entry(HEAVY, "a"), entry(HEAVY, "b")], "b has the sha256"),
        ([entry(HEAVY, "a"), entry(LIGHT, "a")], "a has the id"),
        ([entry(HEAVY, "a", tenant="t"), entry(LIGHT, "b", tenant="t", weight=2)], "differ in their weight"),
        (
            [entry(HEAVY, "a", tenant="others")],
            "a is of a tenant 'others': metrics call the rest of the tenants so; give it another name",
        ),
        ([entry(HEAVY, "-")], "- is of a tenant '-': manta key usage calls requests without a key so"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_with_the_entry_and_without_a_digest(
    tmp_path: Path, entries: object, why: str
) -> None:
    with pytest.raises(InvalidConfig, match=why) as refused:
        TenantKeys.read(written(tmp_path / "keys.yaml", entries))
    assert sha(HEAVY)[:10] not in str(refused.value)


def test_keys_that_others_could_have_written_are_not_in_force_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """Classes 18 and 64: who can write the file can be an admin. A mounted secret is a link to a file of root's."""
    path, fifo = tmp_path / "keys.yaml", tmp_path / "fifo"
    (tmp_path / "secret.yaml").symlink_to(path)
    keys = TenantKeys.read(written(path, ENTRIES) and str(tmp_path / "secret.yaml"))
    path.chmod(0o664)
    with pytest.raises(InvalidConfig, match=r"can be written by others \(mode 664\)"):
        TenantKeys.read(str(path))
    written(path, ENTRIES[:1])
    keys.refresh()
    assert ("can be written by others" in keys.error, len(keys.by_name)) == (True, len(ENTRIES))
    path.chmod(0o640)
    keys.refresh()
    assert (keys.error, len(keys.by_name)) == ("", 1)
    os.mkfifo(fifo, 0o600)
    with pytest.raises(InvalidConfig, match="is no file"):
        TenantKeys.read(str(fifo))
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
        with pytest.raises(InvalidConfig, match="belongs to user 65534"):
            TenantKeys.read(str(path))


def test_a_router_that_starts_has_the_keys_of_now_and_not_those_of_when_it_was_built(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    built = read_keys(api_key_file=None, admin_key=None, keys_file=path, environ={})
    written(tmp_path / "keys.yaml", ENTRIES[1:])
    light, heavy = ({"authorization": f"Bearer {key}"} for key in (LIGHT, HEAVY))
    anew = built.read_anew()
    assert anew.caller(light) is not None
    assert anew.caller(heavy) is None
    (tmp_path / "keys.yaml").unlink()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        built.read_anew()


def test_tokens_count_in_the_minute_in_which_they_come_and_the_estimate_only_while_its_request_runs() -> None:
    clock, key, so_far = Clock(), key_of(output_tokens=1000), SoFar()
    quotas = quotas_of(clock, key)

    def used(so_far_now: SoFar) -> float:
        nonlocal so_far
        so_far = so_far_now
        return quotas.used(key.name, "output_tokens")

    reserved = reserve(quotas, key, 20_000, so_far=lambda: so_far)
    assert [used(SoFar()), used(SoFar(5, 100, 100)), used(SoFar(5, 600, 600))] == [128, 128, 600]
    clock.now_s += 90
    assert used(SoFar(5, 700, 700)) == 600 / 2 + 100  # class 15: what came in the minute before slides away
    with pytest.raises(OverQuota, match="the request needs 700"):  # as long as the one that runs
        reserve(quotas, key, 20_000)
    quotas.settle(reserved, input_tokens=5, output_tokens=720, choices=1)
    assert (quotas.used(key.name, "output_tokens"), quotas.totals["k", "output_tokens"]) == (600 / 2 + 120, 720)


def test_tokens_count_in_their_minute_though_nobody_asks() -> None:
    """A key that streams at its rate for minutes owes nothing at the end."""
    clock, key = Clock(), key_of(output_tokens=1000)
    quotas = quotas_of(clock, key)
    reserved = reserve(quotas, key, 20_000, so_far=lambda: SoFar(5, 600, 600))
    quotas.hear({})  # each TELL_S, also where there is no other router
    clock.now_s += 90
    quotas.settle(reserved, input_tokens=5, output_tokens=600, choices=1)
    assert quotas.used(key.name, "output_tokens") == 600 / 2


def test_a_clock_that_steps_back_doubles_no_debt() -> None:
    clock, key = Clock(), key_of(output_tokens=1000)
    quotas = quotas_of(clock, key)
    use(quotas, key, 15_200)
    seen = []
    for step_s in (120, -60, 60):
        clock.now_s += step_s
        seen.append(quotas.used(key.name, "output_tokens"))
    assert seen[2] == seen[0]


def test_what_exceeds_a_minute_is_owed_and_paid_off_at_the_limits_rate() -> None:
    """Class 15: 15,200 tokens of 1,000 a minute were forgotten after two minutes."""
    clock, key = Clock(), key_of(output_tokens=1000)
    quotas = quotas_of(clock, key)
    use(quotas, key, 15_200)
    with pytest.raises(OverQuota) as refused:
        use(quotas, key, 200)
    assert refused.value.retry_after_s == 15 * 60 + 24  # 1,200 are left then, of which 1,000 slide away
    for minute in range(1, 15):
        clock.now_s = NOW_S + 60 * minute
        assert quotas.used(key.name, "output_tokens") == 15_200 - 1000 * (minute - 1)
    clock.now_s = NOW_S + refused.value.retry_after_s - 1
    with pytest.raises(OverQuota):
        use(quotas, key, 200)
    clock.now_s += 2
    use(quotas, key, 200)
    clock.now_s += 3600
    assert quotas.used(key.name, "output_tokens") == 0


def test_what_is_owed_is_kept_while_nobody_asks_for_it_and_by_the_other_router_too() -> None:
    clock, key = Clock(), key_of(output_tokens=1000)
    one, other = quotas_of(clock, key), quotas_of(clock, key)
    other.hear({"one": one.told({})})
    use(one, key, 9_000)
    for _ in range(5):
        other.hear({"one": copy.deepcopy(one.told({}))})
        clock.now_s += 60
    assert [each.used(key.name, "output_tokens") for each in (one, other)] == [5000, 5000]


def test_short_answers_do_not_open_the_way_for_long_ones() -> None:
    """Class 15: 40 answers of one token made two requests of 7,600 pass a limit of 1,000."""
    key = key_of(output_tokens=1000)
    quotas = quotas_of(key=key)
    for _ in range(40):
        use(quotas, key, 1)  # cut by what it asked for
    reserve(quotas, key, 1900, choices=4)
    assert quotas.used(key.name, "output_tokens") == 40 + 4 * 128
    with pytest.raises(OverQuota):
        reserve(quotas, key, 1900, choices=4)


def test_a_router_counts_what_runs_at_the_others_too() -> None:
    key, so_far = key_of(output_tokens=1000), [SoFar()]
    one, other = quotas_of(key=key), quotas_of(key=key)
    reserve(one, key, 1900, choices=4, so_far=lambda: so_far[0])
    so_far[0] = SoFar(1, 400, 100)
    other.hear({"one": one.told({})})
    assert other.used(key.name, "output_tokens") == 512
    other.hear({})  # it has gone, and what it had left to do
    assert other.used(key.name, "output_tokens") == 400


def test_a_key_is_in_one_place_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", ENTRIES)
    with pytest.raises(InvalidConfig, match="light has a key that is given elsewhere"):
        read_keys(api_key_file=None, admin_key=None, keys_file=path, environ={"MANTA_API_KEYS": LIGHT})


def test_a_changed_file_is_in_force_and_a_bad_one_leaves_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    keys = TenantKeys.read(written(path, ENTRIES))

    def seen() -> tuple[list[str], float, str]:
        found = (keys.find(hashlib.sha256(key.encode()).digest()) for key in (HEAVY, LIGHT, CHIEF))
        failed = next(value for name, _, value in Quotas(keys).figures() if name == "router_keys_file_failed")
        return [key.id for key in found if key is not None], failed, keys.error

    before = ["heavy", "light", "chief"]
    assert seen() == (before, 0, "")
    path.unlink()
    keys.refresh()
    assert (seen()[:2], "cannot be read" in keys.error) == ((before, 1), True)
    caplog.clear()
    monkeypatch.setattr(TenantKeys, "_look", lambda _: (1, 2, 3))  # as after a chmod
    path.write_text("- {id: 2026-02-30}\n")  # ValueError of a date
    for _ in range(2):
        keys.refresh()
        assert (seen()[:2], "is no YAML" in keys.error) == ((before, 1), True)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    written(path, ENTRIES[1:])
    keys.refresh()
    assert seen() == (["light", "chief"], 0, "")


@pytest.mark.parametrize("most", [2, 100])
def test_no_count_of_a_tenant_falls_when_the_file_of_keys_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(quotas_module, "MOST_TENANTS", most)
    path, entries = tmp_path / "keys.yaml", [entry(f"a-key-of-{name}", name) for name in "abc"]
    quotas = Quotas(TenantKeys.read(written(path, entries)), clock=Clock())

    def used(*keys: TenantKey) -> None:
        for key in keys:
            use(quotas, key)

    def seen() -> dict[str, float]:
        return {labels["tenant"]: value for _, labels, value in quotas.figures() if labels.get("kind") == "output"}

    a, _, c = quotas.keys.by_name.values()
    used(a, c, c)
    before = seen()
    assert before == ({"a": 1, "b": 0, "others": 2} if most == 2 else {"a": 1, "b": 0, "c": 2, "others": 0})
    written(path, entries[1:])
    quotas.keys.refresh()
    assert seen() == before
    written(path, [entry("a-key-of-d", "d")])
    quotas.keys.refresh()
    used(*quotas.keys.by_name.values())
    written(path, entries)  # before any scrape
    quotas.keys.refresh()
    assert seen() == (before | {"others": 3} if most == 2 else before | {"d": 1})


def test_a_request_counts_with_an_estimate_and_then_with_what_it_used() -> None:
    quotas, key = quotas_of(), key_of(input_tokens=1000, output_tokens=1000)

    def used() -> list[float]:
        return [quotas.used(key.name, kind) for kind in quotas_module.KINDS]

    reserved = reserve(quotas, key, 5000, input_tokens=600, choices=2)
    assert quotas.used("k", "requests") == 0  # counted by the caller's name
    assert used() == [1, 600, 256]
    with pytest.raises(OverQuota, match=r"has used 600 of its 1,000 input tokens a minute, and the request needs 401"):
        reserve(quotas, key, input_tokens=401)
    quotas.settle(reserved, input_tokens=50, output_tokens=16, choices=2)
    assert used() == [1, 50, 16]
    for output_tokens in (0, 8):
        for _ in range(9):
            again = reserve(quotas, key, 5000)
            assert output_tokens or used()[2] == 16 + 128
            quotas.settle(again, input_tokens=0, output_tokens=output_tokens, choices=1)
    reserve(quotas, key, 5000)
    assert used()[2] == 16 + 9 * 8 + 8  # one of eleven was as long as 128
    assert quotas.totals == {("k", "requests"): 19, ("k", "input_tokens"): 50, ("k", "output_tokens"): 88}


def test_what_is_refused_may_come_when_it_was_told_to_and_not_before() -> None:
    clock = Clock()
    quotas, key = quotas_of(clock), key_of(requests=10)
    for _ in range(10):
        reserve(quotas, key)
    for _ in range(25):  # over three minutes
        with pytest.raises(OverQuota) as refused:
            reserve(quotas, key)
        clock.now_s += refused.value.retry_after_s - 0.01
        with pytest.raises(OverQuota):
            reserve(quotas, key)
        clock.now_s += 0.02
        reserve(quotas, key)
    assert NOW_S + 120 < clock.now_s < NOW_S + 300
    clock.now_s += 121
    assert quotas.used(key.name, "requests") == 0


def test_routers_that_tell_each_other_agree_and_one_that_has_gone_still_counts_for_a_minute() -> None:
    clock = Clock()
    one, other, key = quotas_of(clock), quotas_of(clock), key_of(requests=6)
    for _ in range(3):
        reserve(one, key)
    other.hear({"one": one.told({key.name: 2})})
    assert other.choices_elsewhere(key.name) == 2
    for _ in range(3):
        reserve(other, key)
    one.hear({"other": other.told({})})
    for each in (one, other):
        with pytest.raises(OverQuota):
            reserve(each, key)
    other.hear({})
    assert (other.choices_elsewhere(key.name), other.used(key.name, "requests")) == (0, 6)
    clock.now_s += 121
    other.hear({})
    assert other.used(key.name, "requests") == 0


def test_of_many_at_once_over_two_routers_each_takes_what_it_knows_to_be_free_and_nothing_once_it_is_told() -> None:
    clock, key = Clock(), key_of(requests=30)
    one, other = quotas_of(clock), quotas_of(clock)

    def taken(num: int) -> int:
        found = 0
        for at in range(num):
            with contextlib.suppress(OverQuota):
                reserve((one, other)[at % 2], key)
                found += 1
        told = copy.deepcopy((one.told({}), other.told({})))  # as between processes
        one.hear({"other": told[1]})
        other.hear({"one": told[0]})
        return found

    # ten are free after the first 20, and each router takes as many before it hears of the other's
    assert [taken(20), taken(200), taken(200)] == [20, 20, 0]
    assert one.used(key.name, "requests") == other.used(key.name, "requests") == 40


async def test_a_router_that_hangs_holds_up_no_look_at_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TELL_S", "LOOK_S"):
        monkeypatch.setattr(quotas_module, name, 0.001)
    quotas = Quotas(TenantKeys.read(written(tmp_path / "keys.yaml", ENTRIES)))

    async def hangs() -> dict[str, Told]:
        await asyncio.Event().wait()
        return {}

    keeping = asyncio.create_task(quotas_module.keep(quotas, hangs))
    written(tmp_path / "keys.yaml", ENTRIES[:1])
    async with asyncio.timeout(5):
        while len(quotas.keys.by_name) != 1:
            await asyncio.sleep(0.005)
    keeping.cancel()
    await asyncio.wait([keeping])


class Served:
    """A router whose keys are those of a file, with one scripted replica."""

    def __init__(self, house: House, app: Any, replica: ScriptedReplica) -> None:
        self.house, self.app, self.replica = house, app, replica

    async def ask(self, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://manta", timeout=30) as http:
            headers = {"Authorization": f"Bearer {key}"}
            if path == "/keys":
                return await http.get(path, headers=headers)
            usual = {"prompt": "a b c", "max_tokens": 4} if path == "/v1/completions" else {}
            return await http.post(path, json={**usual, **body}, headers=headers)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    keys = read_keys(api_key_file=None, admin_key=None, keys_file=written(tmp_path / "keys.yaml", ENTRIES), environ={})
    async with House() as house:
        assert keys.tenants is not None
        house.dispatcher.quotas = Quotas(keys.tenants, clock=Clock())
        replica = ScriptedReplica("r1")
        await house.ready(replica)
        service = house.service(Tokenizer(MODEL))
        yield Served(house, make_app(service, keys=keys), replica)


@pytest.mark.model
async def test_headers_say_what_is_left_and_429_comes_in_openais_form(served: Served) -> None:
    answers = [await served.ask(HEAVY) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 429]
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert left == ["3", "2", "1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-output-tokens"] == "100"
    assert "x-ratelimit-limit-input-tokens" not in answers[0].headers
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(answers[-1].headers["retry-after"]) == 75  # a quarter of the minute's four is gone 15 s into the next
    assert len(served.replica.requests) == 4
    assert [record.outcome for record in served.house.dispatcher.routes.recent()].count("invalid") == 1
    served.house.dispatcher.check()


@pytest.mark.model
async def test_of_200_at_once_no_more_are_sent_than_the_limit(served: Served) -> None:
    answers = await asyncio.gather(*(served.ask(HEAVY) for _ in range(200)))
    assert sorted({answer.status_code for answer in answers}) == [200, 429]
    assert len(served.replica.requests) == 4


@pytest.mark.model
async def test_what_a_key_may_not_ask_for_is_refused_by_name(served: Served) -> None:
    refused = await served.ask(LIGHT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    assert refused.json()["error"]["type"] == "permission_error"
    assert (await served.ask("an-unknown-key")).status_code == 401
    for param, value in (("n", 3), ("max_tokens", 60)):
        refused = await served.ask(HEAVY, "/v1/completions", **{param: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not served.replica.requests


TALK = {"messages": [{"role": "user", "content": "a b c"}]}


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", TALK, "max_completion_tokens"),
        ("/v1/completions", {"max_tokens": None}, "max_tokens"),
        ("/v1/responses", {"input": "a b c"}, "max_output_tokens"),
        ("/generate", {"text": "a b c"}, "max_new_tokens"),
        ("/api/chat", {**TALK, "stream": False}, "num_predict"),
    ],
)
async def test_an_output_without_a_limit_has_what_the_keys_context_leaves_and_a_longer_one_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], name: str
) -> None:
    def with_limit(value: int) -> dict[str, Any]:
        inner = {"/generate": "sampling_params", "/api/chat": "options"}.get(path)
        return {**body, inner: {name: value}} if inner else {**body, name: value}

    assert (await served.ask(HEAVY, path, **body)).status_code == 200
    [sent] = served.replica.requests
    longest = len(sent.token_ids) + sent.sampling.max_new_tokens
    assert longest == 60 if path != "/v1/completions" else longest < 60
    refused = await served.ask(HEAVY, path, **with_limit(60))
    assert refused.status_code == 400
    assert f"{name}: prompt and answer may have 60 tokens with this key" in refused.text
    if path != "/api/chat":  # Ollama's errors are a text
        assert refused.json()["error"]["param"] == name


@pytest.mark.model
async def test_a_replica_is_told_tenant_weight_and_a_priority_that_the_key_may_have(served: Served) -> None:
    await served.ask(HEAVY, priority=9)
    await served.ask(CHIEF, priority=9)
    told = [(each.tenant, each.weight, each.priority) for each in served.replica.requests]
    assert told == [("bulk", 2.0, 3), ("chief", 1.0, 9)]


@pytest.mark.model
async def test_a_request_that_fails_here_counts_nothing_and_one_that_ends_as_it_was(served: Served) -> None:
    quotas = served.house.dispatcher.quotas
    assert quotas is not None
    key, used = quotas.key_of(served_name("heavy")), quotas.used
    assert key is not None
    await served.ask(HEAVY)
    assert (used(key.name, "requests"), used(key.name, "output_tokens")) == (1, 4)
    served.house.remove("r1")
    assert (await served.ask(HEAVY)).status_code == 503
    told = {(name, labels.get("tenant"), labels.get("kind")): value for name, labels, value in quotas.figures()}
    assert told["tenant_requests_total", "bulk", None] == 1
    assert (told["tenant_tokens_total", "bulk", "input"], told["tenant_tokens_total", "bulk", "output"]) == (3, 4)
    assert told["tenant_requests_total", "others", None] == 0
    assert (used(key.name, "requests"), used(key.name, "output_tokens")) == (1, 4)


def served_name(id: str) -> str:
    return TenantKey(id=id, sha256=sha(id)).name


@pytest.mark.model
async def test_the_admins_of_the_file_list_its_keys_and_their_use_and_no_key_is_shown(served: Served) -> None:
    assert (await served.ask(HEAVY)).status_code == 200
    refused = await served.ask(HEAVY, "/keys")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "admin_key_needed")
    listed = await served.ask(CHIEF, "/keys")
    assert listed.status_code == 200
    assert sha(HEAVY) not in listed.text
    heavy = listed.json()["keys"][0]
    assert (heavy["tenant"], heavy["used"]["requests"], heavy["used"]["output_tokens"]) == ("bulk", 1, 4)
    lines = terminal.drawn(listed.json()).splitlines()
    [row] = [line.split() for line in lines if line.startswith("heavy")]
    assert row == ["heavy", "bulk", "2", "1", "of", "4", "3", "4", "of", "100", "0"]


def used_by(served: Served, id: str) -> list[float]:
    quotas = served.house.dispatcher.quotas
    assert quotas is not None
    return [quotas.used(served_name(id), kind) for kind in quotas_module.KINDS]


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_is_one_request(served: Served, stream: bool) -> None:
    answer = await served.ask(HEAVY, prompt=["a b c"] * 8, stream=stream)
    assert (answer.status_code, len(served.replica.requests)) == (200, 8)
    assert used_by(served, "heavy") == [1, 8 * 3, 8 * 4]
    served.house.dispatcher.check()


@pytest.mark.model
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/embeddings", {"input": ["a b c"] * 6}),
    ("/v1/score", {"query": "a ", "items": ["b", "c", "d", "e", "f", "g"], "label_token_ids": [5]}),
])  # fmt: skip
async def test_a_list_of_texts_to_read_out_is_one_request(served: Served, path: str, body: dict[str, Any]) -> None:
    served.replica.hold.clear()
    asking = asyncio.create_task(served.ask(FEW, path, **body))
    await until_async(lambda: len(served.replica.requests) == 6)
    sent = sum(len(each.token_ids) for each in served.replica.requests)
    assert used_by(served, "few")[:2] == [1, sent]
    asking.cancel()
    await asyncio.wait([asking])


@pytest.mark.model
async def test_a_list_whose_sum_is_too_much_is_refused_before_any_of_it_is_sent(served: Served) -> None:
    spent = await served.ask(FEW, prompt=["a b c"] * 8)
    assert spent.status_code == 200
    later = await served.ask(FEW, prompt=[f"{word} b c d e f g h i j" for word in "xyzuv"])
    assert later.status_code == 429
    assert "needs 50" in later.json()["error"]["message"]
    never = await served.ask(FEW, prompt=[f"{word} b c d e f g h i j" for word in "xyzuvwt"])
    error = never.json()["error"]
    assert (never.status_code, error["code"], "retry-after" in never.headers) == (400, "request_beyond_limit", False)
    assert "counts as 70 input tokens, and this key may use 60 a minute: send shorter prompts" in error["message"]
    choices = await served.ask(FEW, prompt=["a b c"] * 9)
    error = choices.json()["error"]
    assert (choices.status_code, error["param"], "retry-after" in choices.headers) == (400, "n", False)
    assert len(served.replica.requests) == 8
    outcomes = [record.outcome for record in served.house.dispatcher.routes.recent()]
    assert set(outcomes[8:]) == {"invalid"}
    assert used_by(served, "few")[0] == 1
    served.house.dispatcher.check()


@pytest.mark.model
async def test_what_prompts_of_a_list_have_in_common_is_estimated_once(served: Served) -> None:
    served.replica.hold.clear()
    asking = asyncio.create_task(served.ask(FEW, prompt=["a " * 33 + word for word in "xyzuvwts"]))
    await until_async(lambda: len(served.replica.requests) == 8)
    assert {len(each.token_ids) for each in served.replica.requests} == {34}
    assert used_by(served, "few")[:2] == [1, 34 + 7 * 2]  # beyond the two whole pages that all begin with
    served.replica.hold.set()
    assert (await asking).status_code == 200


@pytest.mark.model
async def test_of_a_list_that_fails_here_what_has_not_begun_counts_nothing(served: Served) -> None:
    broken = Finish(reason=FinishReason.ERROR, message="the step broke", fault=Fault.INTERNAL)
    served.replica.hold.clear()
    asking = asyncio.create_task(served.ask(HEAVY, prompt=["a b c"] * 3))
    await until_async(lambda: len(served.replica.requests) == 3)
    assert used_by(served, "heavy")[:2] == [1, 9]
    served.replica.send(
        TokenDelta(
            rid=served.replica.requests[0].rid,
            index=0,
            finish=broken,
            usage=Usage(prompt_tokens=3, completion_tokens=0, cached_tokens=0),
        )
    )
    assert (await asking).status_code == 500
    assert used_by(served, "heavy") == [1, 3, 0]
    served.house.dispatcher.check()


async def test_what_is_delivered_of_a_request_counts_before_it_ends_and_its_key_waits_for_no_more_than_that() -> None:
    """Class 15, over the counts of the dispatcher: two choices that are longer than their estimate."""
    key = key_of(output_tokens=1000)
    quotas, request = quotas_of(key=key), ask(rid="r", n=2, max_new_tokens=1900)
    progress, charge = Progress(request), Charge([request], quotas, key)
    charge.sends(progress, 1)  # estimated; 2 are computed
    for index, num in ((0, 300), (1, 650)):
        usage = Usage(prompt_tokens=3, completion_tokens=num, cached_tokens=1)
        progress.accept(TokenDelta(rid="r", index=index, token_ids=(7,) * num, usage=usage), None)
    assert [quotas.used(key.name, kind) for kind in quotas_module.KINDS] == [1, 2, 950]
    with pytest.raises(OverQuota):
        reserve(quotas, key, 60)
    charge.end(failed=True)  # its replica: what was delivered counts
    assert [quotas.used(key.name, kind) for kind in quotas_module.KINDS] == [1, 2, 950]
    again, rest = Progress(request), Charge([request], quotas, key)
    again.restore({0: [7]})
    rest.sends(again, 1)
    again.accept(TokenDelta(rid="r", index=0, token_ids=(7,) * 960, usage=usage), None)
    assert [quotas.used(key.name, kind) for kind in quotas_module.KINDS] == [1, 2, 1910]


@pytest.mark.model
async def test_runs_of_one_cut_stream_again_and_again_do_not_pass_the_limit(served: Served) -> None:
    """Class 15: a resumed request was never refused, so one id of an event was worth any number of answers."""
    dispatcher, outcomes = served.house.dispatcher, list[bool]()
    quotas = dispatcher.quotas
    assert quotas is not None
    for _ in range(4):  # no request is left, which refuses none of those that began elsewhere
        reserved = reserve(quotas, quotas.keys.by_name[served_name("heavy")])
        quotas.settle(reserved, input_tokens=0, output_tokens=0, choices=1)
    for number in range(8):
        rid = owned(f"0123456789abcdef.{number}-again", served_name("heavy"))
        try:
            deltas = [_ async for _ in dispatcher.stream(ask(rid=rid, max_new_tokens=42), made={0: [1000, 1001]})]
            outcomes.append(bool(deltas))
        except OverQuota:
            outcomes.append(False)
    assert outcomes == [True] * 4 + [False] * 4  # 160 tokens of 100, which may be twice as many for what was cut
    assert quotas.totals["bulk", "output_tokens"] == 160  # without those that another router delivered
    assert used_by(served, "heavy")[:2] == [4, 0]  # the other router counted those
    dispatcher.check()


@pytest.mark.model
async def test_a_prompt_is_cut_to_what_its_key_may_use(served: Served) -> None:
    long = "a b c d e f g h i j " * 10
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/generate", {"text": long, "sampling_params": {"max_new_tokens": 4}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "max_tokens": 4}),
    ):
        answer = await served.ask(HEAVY, path, truncate_prompt_tokens=-1, **body)
        assert answer.status_code == 200, answer.text
    assert [len(each.token_ids) for each in served.replica.requests] == [56, 56, 56]
