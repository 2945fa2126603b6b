"""What a client and an operator are told of tiers: usage, native details, the route, /server_info. No engine."""

import dataclasses
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from deployments.channel.channel_client import ChannelClient
from deployments.dispatch.leases import ReplicaGone
from deployments.http.http_app import make_app
from deployments.replica.served_engine import _tiers
from kvtransfer.pages import Tier, page_keys
from replicas.config import CacheConfig
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, PoolStats, TierStats, TokenDelta
from tests.embedded import MODEL
from tests.unit.deployments.in_process import PAGE_SIZE, House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.sample_values import stats
from tests.waiting import until_async

PROMPT = list(range(100, 265))  # 10 pages of 16, and 5 tokens
POOL = PoolStats(
    page_size=PAGE_SIZE, num_pages=100, free_pages=100, evictable_pages=0, protected_pages=0, reserved_pages=0
)
TIERS = TierStats(host_pages=100, host_used_pages=3, store="disk", host_s_per_token=1e-4, store_s_per_token=1e-4,
                  store_latency_s=0.002)  # fmt: skip


class Tiered(ScriptedReplica):
    """Its requests find 32 tokens on the device, 48 on the host and 64 in the store; of 7 drafts 5 come true."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.stats = dataclasses.replace(stats(prefill_tokens_per_s=1000.0), pool=POOL, tiers=TIERS)

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        sink = client.sink

        def with_tiers(deltas: list[TokenDelta]) -> None:
            sink(
                [
                    dataclasses.replace(
                        each,
                        usage=dataclasses.replace(
                            each.usage, cached_tokens=144, host_tokens=48, store_tokens=64,
                            drafted_tokens=7, accepted_tokens=5,
                        ),
                    )
                    for each in deltas
                ]
            )

        client.sink = with_tiers
        await super()._generate(client, request)

    def hold_pages(self) -> None:
        """Tell where its pages of PROMPT are: 2 on the device, 3 on the host, 4 in the store."""
        keys, ids = page_keys(np.array(PROMPT, dtype=np.int32), PAGE_SIZE, ""), np.empty(0, np.int32)
        for start, end, tier in ((0, 2, Tier.DEVICE), (2, 5, Tier.HOST), (5, 9, Tier.STORE)):
            self.cache.stored(keys[start:end], None, PAGE_SIZE, ids, tier)
        self._tell(tell=True)


@dataclass
class Desk:
    """A router over HTTP with one replica, which has told of its pages."""

    client: httpx.AsyncClient
    house: House


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with House(policy="estimated_ttft") as house:
        replica = Tiered("r0")
        await house.ready(replica)
        replica.hold_pages()
        await until_async(lambda: house.router.applied("r0") == 3)
        async with client_of(make_app(house.service(Tokenizer(MODEL)))) as client:
            yield Desk(client, house)


NATIVE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
DETAILS = {"device": 32, "host": 48, "storage": 64}


@pytest.mark.model
async def test_the_native_answer_tells_the_cached_tokens_of_each_tier(desk: Desk) -> None:
    meta = (await desk.client.post("/generate", json=NATIVE)).json()["meta_info"]
    assert (meta["cached_tokens"], meta["cached_tokens_details"]) == (144, DETAILS)
    streamed = (await desk.client.post("/generate", json={**NATIVE, "stream": True})).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert events
    assert all(each["meta_info"]["cached_tokens_details"] == DETAILS for each in events)


@pytest.mark.model
async def test_usage_counts_every_tier(desk: Desk) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    usage = (await desk.client.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 144}
    streamed = await desk.client.post(
        "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    last = json.loads([line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")][-1])
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 144}


@pytest.mark.model
async def test_the_route_tells_what_was_to_be_loaded_and_what_was(desk: Desk) -> None:
    load_s = 48 * 1e-4 + 0.002 + 64 * 2e-4
    answer = await desk.client.post("/generate", json=NATIVE, headers={"X-Request-Id": "me"})
    header = answer.headers["x-manta-route"]
    assert "overlap_predicted=144; overlap_actual=144; tiers_predicted=32+48+64; " in header
    assert f"load_s={load_s:.4f}; tiers_actual=32+48+64; policy=estimated_ttft" in header
    [told] = (await desk.client.get("/route/me")).json()["tries"]
    actual = told["actual"]
    assert (actual["host_tokens"], actual["store_tokens"]) == (48, 64)
    assert (actual["drafted_tokens"], actual["accepted_tokens"]) == (7, 5)  # as its last delta tells
    assert told["predicted"]["load_s"] == pytest.approx(load_s)
    [candidate] = told["candidates"]
    assert {name: candidate[f"{name}_tokens"] for name in ("cached", "device", "host", "store", "own")} == {
        "cached": 144, "device": 32, "host": 48, "store": 64, "own": 21,
    }  # fmt: skip
    assert candidate["load_s"] == pytest.approx(load_s)
    assert candidate["ttft_s"] == pytest.approx(0.021 + load_s, abs=0.002)


@pytest.mark.model
async def test_server_info_tells_the_tiers_and_what_they_did(desk: Desk) -> None:
    [state] = (await desk.client.get("/get_server_info")).json()["internal_states"]
    assert state["stats"]["tiers"]["host_pages"] == 100
    assert state["replica"]["tiers"] == {}


@pytest.mark.model
async def test_server_info_names_a_replica_in_service_that_does_not_tell_of_itself(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise ReplicaGone("its connection is lost")

    silent = Tiered("r1")
    await desk.house.ready(silent)
    monkeypatch.setattr(silent, "report", fails)
    info = (await desk.client.get("/get_server_info")).json()
    assert [state["replica"]["replica_id"] for state in info["internal_states"]] == ["r0"]
    assert info["not_answering"] == ["r1"]


def test_a_replicas_tiers_are_told_without_the_keys_of_its_store() -> None:
    assert _tiers(CacheConfig()) == {}
    cache = CacheConfig(host_memory_bytes=1, store="s3://me:secret@bucket/kv?endpoint=http://x&key=secret")
    assert _tiers(cache) == {
        "host_eviction": cache.host_eviction, "write_policy": "adaptive", "prefetch": "expected",
        "store": "s3://bucket/kv", "store_bytes": str(10 << 30),
    }  # fmt: skip
