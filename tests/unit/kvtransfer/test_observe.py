"""The events of a KV transfer: their fields, and that they cost nothing while they are off."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.layout import KvLayout
from kvtransfer.replay import observe
from kvtransfer.replay.payload import PayloadMeta
from tests.transfer_net import Net

LAYOUT = KvLayout(
    model="m", architecture="MHA", num_layers=2, num_kv_heads=3, head_dim=4, dtype="float16", item_bytes=2,
    page_size=4, tp=1,
)  # fmt: skip
LAYOUTS = {
    "MHA": LAYOUT,
    "narrow": replace(LAYOUT, dtype="int8", item_bytes=1),  # 4 numbers and their scale: as many bytes
    "MLA": replace(LAYOUT, architecture="MLA", num_kv_heads=1),
}


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    observe.enable()
    yield caplog
    observe.enable(False)


def lines(caplog: pytest.LogCaptureFixture, event: str = "") -> list[dict[str, object]]:
    written = [json.loads(record.getMessage()) for record in caplog.records if record.name == observe.log.name]
    return [fields for fields in written if event in ("", fields["event"])]


def some(layout: KvLayout = LAYOUT) -> tuple[PayloadMeta, np.ndarray]:
    meta = PayloadMeta(
        rid="r1",
        layout=layout,
        prompt_len=25,
        cached_prefix_len=8,
        token_range=(4, 25),
        row=3,
        slots=np.arange(40, 61, dtype=np.int32),
    )
    return meta, np.random.default_rng(1).integers(0, 256, meta.shape, dtype=np.uint8)


def test_what_is_about_to_be_sent(events: pytest.LogCaptureFixture) -> None:
    """SPEC J01: 21 tokens of 2 layers x K, V x 3 heads x 4 x 2 bytes."""
    meta, payload = some()
    observe.prefill_before_send(meta, payload)
    (written,) = lines(events)
    k_hash, v_hash = written.pop("k_hash"), written.pop("v_hash")
    assert k_hash != v_hash
    assert written == {
        "event": "prefill_before_send",
        "rid": "r1",
        "prompt_len": 25,
        "cached_prefix_len": 8,
        "token_range": [4, 25],
        "req_pool_idx": 3,
        "kv_indices": {"shape": [21], "dtype": "int32", "first": list(range(40, 56)), "min": 40, "max": 60},
        "layout": {
            "model": "m", "architecture": "MHA", "num_layers": 2, "num_kv_heads": 3, "head_dim": 4,
            "dtype": "float16", "item_bytes": 2, "page_size": 4, "tp": 1, "state_bytes": 0,
                "window_layers": 0, "window_pages": 0,
        },
        "payload_total_bytes": 21 * 96,
    }  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_restored_has_its_row_too_and_the_same_hashes(events: pytest.LogCaptureFixture, name: str) -> None:
    """SPEC J03, L10."""
    meta, payload = some(LAYOUTS[name])
    observe.prefill_before_send(meta, payload)
    observe.decode_after_restore(meta, payload.copy(), table_row=np.arange(36, 61, dtype=np.int32))
    sent, restored = lines(events)
    row = restored.pop("req_to_token")
    assert row == {"shape": [25], "dtype": "int32", "first": list(range(36, 52)), "min": 36, "max": 60}
    assert {**sent, "event": "decode_after_restore"} == restored


@pytest.mark.parametrize(
    ("name", "part", "sides"),
    [("MHA", 0, "k"), ("MHA", 1, "v"), ("narrow", 0, "k"), ("narrow", 1, "v"), ("MLA", 0, "kv")],
)
def test_a_changed_byte_changes_the_hash_of_its_side(name: str, part: int, sides: str) -> None:
    """MLA's vector is K and V."""
    _, payload = some(LAYOUTS[name])
    before = dict(zip("kv", observe.kv_digests(payload), strict=True))
    payload[1, part, 20, -1, 7] ^= 1
    after = dict(zip("kv", observe.kv_digests(payload), strict=True))
    assert [side for side in "kv" if before[side] != after[side]] == list(sides)


@pytest.mark.parametrize("tp", [1, 3])
def test_every_write_of_every_rank_is_an_event(events: pytest.LogCaptureFixture, tp: int) -> None:
    """SPEC J02: 5 pages, 2 a write, are 3 writes of each rank; a page of all heads has 3,072 bytes."""
    net = Net()
    prefill, decode = net.add(tp=tp), net.add()
    room = net.kv_transfer(prefill, decode, num_pages=5)
    assert room is not None
    while room.given < 0:
        net.run(0.1)
    prefill.send(room, 5, last=True)
    net.run(1.0)
    assert room.receives == ["Received"]
    written = lines(events, "transfer_submit")
    assert sorted((fields["rank"], fields["num_bufs"]) for fields in written) == [
        (rank, pages) for rank in range(tp) for pages in (1, 2, 2)
    ]
    assert {(fields["rid"], fields["room"]) for fields in written} == {("r", 1)}
    assert sum(fields["total_bytes"] for fields in written) == 5 * 3072  # type: ignore[misc]
    assert written[0]["buffers"] == [{"device": "cpu", "nbytes": 3072 // tp, "dtype": "float32"}] * 2
    assert all(0 <= fields["latency_s"] < 10 for fields in written)  # type: ignore[operator]


def test_verbose_logging_does_not_turn_it_on(caplog: pytest.LogCaptureFixture) -> None:
    """Copying all K/V of a prompt is nothing to do by the way."""
    with caplog.at_level(logging.DEBUG):
        assert not observe.enabled()
        observe.prefill_before_send(*some())
    assert lines(caplog) == []


def test_a_write_whose_observation_fails_raises_nothing_on_the_thread_of_transfers(
    events: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC L10, J02: that thread would end with it, and every KV transfer of the replica."""
    monkeypatch.setattr(observe, "_emit", None)
    for rid in "ab":
        observe.transfer_submit(
            rid=rid, room=1, rank=0, device="cpu", dtype="float16", buffers_bytes=[96], latency_s=0.1
        )
    (said,) = [record.getMessage() for record in events.records]
    assert said == "transfer_submit failed; requests are not affected, its events are missing"
