"""Two real engines hand a request over: what both observed is equal, and a snapshot goes on from there."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.replay import observe
from kvtransfer.types import PdTicket, TransferSettings
from replicas.engine.engine import Engine
from replicas.replay.replay import extract, restore
from replicas.types import GenerateRequest, PdLeg, PdTransfer, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.harness import small_engine
from tests.local_agents import LocalAgent, LocalFabric
from tests.numerics import tiny

pytestmark = pytest.mark.model
LIMIT_S = 60.0
PROMPT = (np.arange(50) * 37 % tiny.VOCAB).astype(np.int32)  # 13 pages of 4, the last one half full
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_new_tokens=10, repetition_penalty=1.2)


TOKEN_BYTES = {"qwen3": 3 * 2 * 2 * 16 * 2, "v3": 3 * 32 * 2}  # bfloat16; K and V of 2 heads; one latent vector


@pytest.fixture(scope="module", params=TOKEN_BYTES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / str(request.param)
    tiny.save(request.param, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL, name), folder / name)
    return str(folder)


def make_engine(folder: str, fabric: LocalFabric | None = None, *, name: str = "") -> Engine:
    transfer = {} if fabric is None else {
        "transfer": TransferSettings(host="127.0.0.1", token=b"of this test"),
        "make_agent": lambda memory: LocalAgent(memory, fabric, name),
    }  # fmt: skip
    return small_engine(
        folder, page=4, tokens=512, chunk=16, running=4, attention="torch_native", cache={"kv_dtype": "bfloat16"},
        **transfer,
    )  # fmt: skip


@pytest.fixture
def pair(folder: str) -> Iterator[tuple[Engine, Engine]]:
    """The prefill and the decode side."""
    fabric = LocalFabric()
    engines = make_engine(folder, fabric, name="p"), make_engine(folder, fabric, name="d")
    observe.enable()
    yield engines
    observe.enable(False)
    for engine in engines:
        engine.close()


def submit_both(prefill: Engine, decode: Engine) -> None:
    assert prefill.transfer_address is not None
    ticket = PdTicket(room=1, generation=0, prefill=prefill.transfer_address)
    for engine, leg in ((prefill, PdLeg.PREFILL), (decode, PdLeg.DECODE)):
        engine.submit(
            GenerateRequest(
                rid="a", token_ids=PROMPT, sampling=SAMPLING, kv_transfer=PdTransfer(leg=leg, ticket=ticket)
            )
        )


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_hashes_on_both_sides_are_equal_and_a_snapshot_goes_on(
    pair: tuple[Engine, Engine], folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SPEC J01-J04, H18, L10. The decode side holds 8 of the 50 tokens; 42 are sent: 11 pages of 4."""
    token_bytes = TOKEN_BYTES[Path(folder).name]
    prefill, decode = pair
    alone = make_engine(folder)
    wanted = alone.submit(GenerateRequest(rid="a", token_ids=PROMPT, sampling=SAMPLING))
    primed = decode.submit(
        GenerateRequest(rid="prime", token_ids=PROMPT[:9], sampling=SamplingParams(max_new_tokens=1))
    )
    while alone.has_work or decode.has_work:
        wanted += alone.step()
        primed += decode.step()
    caplog.clear()

    submit_both(prefill, decode)
    made: list[TokenDelta] = []
    snapshot = None
    deadline_s = time.monotonic() + LIMIT_S
    while prefill.has_work or decode.has_work:
        assert time.monotonic() < deadline_s, f"{prefill.stats()}, {decode.stats()}"
        prefill.step()
        made += decode.step()
        req = decode.find("a")
        if snapshot is None and req is not None and req.num_output == 4:
            snapshot = extract(decode, "a")
    assert ids(made) == ids(wanted)
    assert made[0].kv_transfer is not None
    assert made[0].kv_transfer.transferred, made[0].kv_transfer.reason

    told = [json.loads(record.getMessage()) for record in caplog.records if record.name == observe.log.name]
    events = {name: [line for line in told if line["event"] == name] for name in {line["event"] for line in told}}
    (sent,), (got,) = events["prefill_before_send"], events["decode_after_restore"]
    assert sent["token_range"] == got["token_range"] == [8, 50]
    assert (sent["k_hash"], sent["v_hash"]) == (got["k_hash"], got["v_hash"])
    assert sent["payload_total_bytes"] == got["payload_total_bytes"] == 42 * token_bytes
    assert sum(write["num_bufs"] for write in events["transfer_submit"]) == 11
    assert sum(write["total_bytes"] for write in events["transfer_submit"]) == 11 * 4 * token_bytes
    steps = [line for line in events["decode_step"] if line["rid"] == "a"]
    assert [step["next_token"] for step in steps] == ids(made)[1:]

    assert snapshot is not None
    continued = restore(alone, snapshot)
    while alone.has_work:
        continued += alone.step()
    assert ids(continued) == ids(made)[4:]
