"""A recording tells enough to replay a day, and nothing of what was said; it fails no request."""

import asyncio
import base64
import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks import router
from deployments.dispatch.dispatcher import RouteHints
from deployments.record import recording
from deployments.record.recording import Recorder
from deployments.record.route_log import Ended
from deployments.record.timeline import Arrival, Timeline
from kvtransfer.pages import page_keys
from replicas.config import SchedulerConfig
from replicas.types import GenerateRequest, SamplingParams
from tests.unit.deployments.in_process import PAGE_SIZE, House, ScriptedReplica

SECRET, SESSION = "a" * 16, "ward-7"
SYSTEM = list(range(40_000, 40_000 + 3 * PAGE_SIZE))  # three pages that prompts share
MAX_BYTES = 1 << 20


def request(*more: int, rid: str = f"{'0' * 16}{SECRET}.0-patient-x", output: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=output)
    token_ids = np.array([*SYSTEM, *more], dtype=np.int32)
    return GenerateRequest(rid=rid, token_ids=token_ids, sampling=sampling, priority=2, cache_salt="of a key")


async def recorded(
    folder: pathlib.Path, *requests: GenerateRequest, max_bytes: int = MAX_BYTES, hints: RouteHints | None = None
) -> tuple[Recorder, list[dict[str, Any]]]:
    """Serve ``requests`` in turn, and return the recorder and the lines of its file."""
    facts = {"model": "none", "objective_s": 2.0, "scheduler": dataclasses.asdict(SchedulerConfig())}
    filled_in = {
        "scheduler.chunked_prefill_size": {"value": 64, "why": "small"},
        "parallel.tp": {"value": 1, "why": ""},
    }
    recorder = Recorder(
        folder,
        name="router",
        page_size=PAGE_SIZE,
        max_bytes=max_bytes,
        facts=facts,
        filled_in_of=lambda name: filled_in,
    )
    async with House() as house, asyncio.timeout(20):
        house.dispatcher.watch.on_end = recorder.add
        await house.ready(ScriptedReplica("r0", token_s=0.002))
        for each in requests:
            deltas = [delta async for delta in house.dispatcher.stream(each, hints or RouteHints(session_id=SESSION))]
            assert deltas[-1].finish is not None
    recorder.close()
    text = recorder.path.read_text() if recorder.path.exists() else ""
    return recorder, [json.loads(line) for line in text.splitlines()]


def blocks(line: dict[str, Any]) -> list[str]:
    text = line["blocks"]
    return [text[at : at + 8] for at in range(0, len(text), 8)]


async def test_a_line_says_how_much_was_asked_and_what_happened(tmp_path: pathlib.Path) -> None:
    recorder, (facts, replica, line) = await recorded(tmp_path, request(1, 2, 3))
    assert (facts["recording"], facts["page_size"], facts["model"]) == (1, PAGE_SIZE, "none")
    assert (replica["replica"], replica["role"], replica["pool_pages"]) == ("r0", "unified", 10)
    assert replica["scheduler"] == {"chunked_prefill_size": 64}
    known = {name: line[name] for name in ("prompt", "output", "cached_l1", "n", "max_tokens", "priority")}
    assert known == {"prompt": 51, "output": 3, "cached_l1": 0, "n": 1, "max_tokens": 3, "priority": 2}
    assert (line["model_replica"], line["outcome"], line["finish"], line["tries"]) == ("r0", "ok", "length", 1)
    assert line["objective_s"] == 2.0
    assert line["time_s"] == pytest.approx(facts["time_s"], abs=10)
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert len(blocks(line)) == (51 + 3 - 1) // PAGE_SIZE
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert recorder.num_lost == 0


async def test_nothing_that_was_said_and_no_name_is_in_the_file(tmp_path: pathlib.Path) -> None:
    recorder, lines = await recorded(tmp_path, request(41_234, output=20))
    text = recorder.path.read_text()
    for word in (SECRET, SESSION, "patient-x", "of a key", "<0>"):
        assert word not in text, word
    said = {*SYSTEM, 41_234, *range(1000, 1020)}
    values = [value for line in lines if "blocks" in line for value in line.values()]
    assert not [value for value in values if isinstance(value, list | dict) or value in said]
    hashes = json.loads(text.splitlines()[-1])
    assert {len(hashes[name]) for name in ("session", "tenant")} == {8}
    unsalted = page_keys(request(41_234).token_ids, PAGE_SIZE, "of a key")
    assert not {base64.urlsafe_b64encode(key.tobytes()[:6]).decode() for key in unsalted} & set(blocks(hashes))


async def test_prefixes_are_shared_inside_a_recording_and_not_across_two(tmp_path: pathlib.Path) -> None:
    """The second prompt is the first one, its answer of 1000, 1001, ..., and a question."""
    first = request(*range(8), output=41)
    second = request(*range(8), *range(1000, 1041), 9)
    recorder, told = await recorded(tmp_path, first, second, request(5))
    lines = [line for line in told if "blocks" in line]
    one, two, other = map(blocks, lines)
    assert one == two[:6]  # 56 of the prompt and 40 of the answer
    keys = page_keys(second.token_ids, PAGE_SIZE, second.namespace)
    assert two == [recorder._digest(key.tobytes()) for key in keys]
    timeline = Timeline(Arrival(endpoint="chat", arrived_s=0.0), num_choices=1)
    refused = Ended(request=second, session_id="", answer=(), timeline=timeline, record=None, outcome="shed")
    assert recorder._blocks(refused) == "".join(two)
    assert other[:3] == one[:3]
    assert lines[0]["session"] == lines[1]["session"]
    (again,) = [line for line in (await recorded(tmp_path / "two", first))[1] if "blocks" in line]
    assert not set(blocks(again)) & set(one)
    assert again["session"] != lines[0]["session"]
    assert again["tenant"] != lines[0]["tenant"]


async def test_a_recording_ends_where_it_is_full_and_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, lines = await recorded(tmp_path, *(request(at) for at in range(40)), max_bytes=4000)
    assert 2 < len(lines) < 20
    assert recorder.path.stat().st_size <= 4000
    assert [each.levelno for each in caplog.records if "ends at" in each.message] == [logging.WARNING]


async def test_a_full_disk_fails_no_request_is_said_once_and_counted(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes ten bytes of a line and no more, for a while; those ten go again."""
    real, writes = os.write, list[int]()

    def write(file: int, data: bytes) -> int:
        writes.append(len(data))
        if len(writes) <= 4:
            if len(writes) % 2:
                return real(file, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(recording, "BATCH", 1)
    recorder, lines = await recorded(tmp_path, *(request(at) for at in range(4)))
    assert recorder.num_lost == 2
    assert [line["lost"] for line in lines if "lost" in line] == [2]
    assert len([line for line in lines if "blocks" in line]) == 2
    assert len([each for each in caplog.records if "No space left on device" in each.message]) == 1


async def test_a_recording_whose_folder_was_deleted_begins_anew_as_a_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, gone = tmp_path / "records", Recorder._write, list[bool]()

    def write(self: Recorder, batch: Sequence[Ended]) -> None:
        if self.path.exists() and not gone:  # the first request is written
            gone.append(True)
            shutil.rmtree(folder)
        real(self, batch)

    monkeypatch.setattr(recording, "BATCH", 1)
    monkeypatch.setattr(Recorder, "_write", write)
    recorder, lines = await recorded(folder, *(request(at) for at in range(3)))
    assert [sorted({"recording", "replica", "blocks"} & line.keys()) for line in lines] == [
        ["recording"], ["replica"], ["blocks"], ["blocks"],
    ]  # fmt: skip
    assert (gone, recorder.num_lost) == ([True], 0)


async def test_a_folder_that_cannot_be_written_fails_no_request(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    recorder, lines = await recorded(tmp_path / "file", request(1), request(2))
    assert (recorder.num_lost, lines) == (2, [])


async def test_what_is_written_too_slowly_is_lost_and_counted_without_waiting(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 2)
    monkeypatch.setattr(recording, "CLOSE_S", 0.01)
    monkeypatch.setattr(Recorder, "_run", lambda self: None)
    recorder, _ = await recorded(tmp_path, *(request(at) for at in range(5)))
    assert recorder.num_lost == 3


async def test_a_recording_can_be_simulated_with_more_replicas(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder, _ = await recorded(tmp_path, *(request(at % 4, output=4 + at % 5) for at in range(30)))
    router.main(["simulate", "--trace", str(recorder.path), "--replicas", "1", "2", "--json", str(tmp_path / "rows")])
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    hits = {row["name"]: row["value"] for row in rows if row["figure"] == "hit"}
    assert list(hits) == ["as recorded", "estimated_ttft, 1 replica", "estimated_ttft, 2 replicas"]
    assert hits["as recorded"] == 0  # scripted replicas cache nothing; the production cache that is simulated does
    assert hits["estimated_ttft, 1 replica"] == pytest.approx(100 * 29 * 48 / (30 * 49))
    assert "fitted to 30 requests" in capsys.readouterr().out
