"""The comparison's course: servers that start, die or are too slow, and what is done about it. No engine."""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.live_app import ServerFailed
from benchmarks.peers import __main__ as command_line
from benchmarks.peers.compare import Cell, Comparison, same
from benchmarks.peers.servers import Command, running
from benchmarks.peers.systems import Place, Serving, System, Words
from benchmarks.workloads import Workload, random_lengths, shared_prefix
from tests.serve.running import free_port

TEXT = "the cat sat and the dog ran for the cat that was with the other dog and sat on that mat "


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """Of a byte-level tokenizer that learned a dozen words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT * 20], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Words(folder)


class Endpoint(BaseHTTPRequestHandler):
    """Answers each completion with as many tokens as asked for; a class of its own for each server."""

    prompts: list[str | list[int]]
    hang = threading.Event()
    hang_on_len = 10**9  # prompts of so many tokens are not answered before ``hang``

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(body["prompt"])
        if len(body["prompt"]) >= self.hang_on_len:
            self.hang.wait(30)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        for _ in range(body["max_tokens"]):
            self._send({"choices": [{"text": " cat", "token_ids": [7]}]})
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeSystem:
    """A server in a thread; counts its starts. ``fails_at``: the start that fails, from 1."""

    def __init__(self, name: str, *, fails_at: int = 0, hang_on_len: int = 10**9) -> None:
        self.starts = 0
        self.fails_at = fails_at
        self.hang = threading.Event()
        self.handler = type(
            "Handler", (Endpoint,), {"prompts": [], "hang": self.hang, "hang_on_len": hang_on_len}
        )
        self.system = System(name=name, settings="", exact=True, start=self.start)

    @contextlib.contextmanager
    def start(self, place: Place) -> Iterator[Serving]:
        self.starts += 1
        if self.starts == self.fails_at:
            raise ServerFailed("ended with 1 while it started")
        server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", "m"
        finally:
            self.hang.set()
            server.shutdown()
            thread.join()
            server.server_close()


def cell(name: str, input_len: int, *, max_s: float = 20.0) -> Cell:
    def make(vocab_size: int, seed: int) -> Workload:
        return random_lengths(num_requests=2, input_len=input_len, output_len=3, vocab_size=vocab_size, seed=seed)

    return Cell(name=name, make=make, concurrency=2, max_s=max_s)


def comparison(words: Words, *fakes: FakeSystem, cells: list[Cell], rounds: int = 1) -> tuple[Comparison, list[str]]:
    said: list[str] = []
    made = Comparison(
        systems=[fake.system for fake in fakes], cells=cells, rounds=rounds, seed=0, words=words, say=said.append,
        place=Place(threads=1, logs=Path("unused")),
    )  # fmt: skip
    return made, said


def test_rounds_alternate_and_both_systems_get_the_same_prompts(words: Words) -> None:
    a, b = FakeSystem("a"), FakeSystem("b")
    compared, said = comparison(words, a, b, cells=[cell("short", 5)], rounds=2)
    compared.run()
    assert [line.split(",")[0] for line in said] == ["a", "b", "b", "a"]
    assert [sum(sample.completion_tokens for sample in each.run.samples) for each in compared.runs] == [6, 6, 6, 6]
    assert sorted(map(str, a.handler.prompts)) == sorted(map(str, b.handler.prompts))
    assert all(same(*pair) for pair in zip(compared.answers["a"], compared.answers["b"], strict=True))
    first, second = (run for run in compared.runs if run.system == "a")
    assert (first.round, second.round) == (0, 1)


def test_a_system_that_does_not_start_is_absent_and_the_others_go_on(words: Words) -> None:
    dead, alive = FakeSystem("dead", fails_at=1), FakeSystem("alive")
    compared, _ = comparison(words, dead, alive, cells=[cell("short", 5)], rounds=2)
    compared.run()
    assert compared.absent == {"dead": "round 1: ended with 1 while it started"}
    assert dead.starts == 1  # not tried again
    assert [(run.system, run.problem) for run in compared.runs] == [("alive", None)] * 2


def test_after_a_workload_that_does_not_finish_the_server_starts_anew_and_the_rest_runs(words: Words) -> None:
    slow = FakeSystem("slow", hang_on_len=700)
    cells = [cell("long", 700, max_s=0.3), cell("short", 5)]
    compared, said = comparison(words, slow, cells=cells, rounds=2)
    compared.run()
    problem = "0 of 2 answered; 2 x cut off after 0.3 s"
    assert [(run.cell, run.problem) for run in compared.runs] == [("long", problem), ("short", None), ("short", None)]
    assert slow.starts == 3  # two in the first round; the second does not try the long one again
    assert "cut off after 0.3 s" in said[0]


def test_what_was_measured_is_reported_even_if_something_unforeseen_ends_the_comparison(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def cannot(place: Place) -> Iterator[Serving]:
        raise OSError("no space left")
        yield

    listed = {"a": FakeSystem("a").system, "b": System(name="b", settings="", exact=True, start=cannot)}
    monkeypatch.setattr(command_line, "Words", lambda folder: words)
    monkeypatch.setattr(command_line, "systems", lambda words: listed)
    out = tmp_path / "peers.json"
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(OSError, match="no space left"):
            command_line.main(["--quick", "--cell", "batch-1", "--json", str(out)])
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = [row for row in json.loads(out.read_text())["rows"] if row["figure"] == "runs"]
    assert [(row["name"], row["value"], row["note"]) for row in rows] == [("a", 1, ""), ("b", 0, "not run")]


def test_a_server_that_is_never_ready_is_killed_with_its_children(tmp_path: Path) -> None:
    command = Command(argv=_with_a_child(tmp_path / "alive"), env={}, port=free_port(), model="m")
    with pytest.raises(ServerFailed, match="was not ready after 1 s"):  # noqa: SIM117
        with running(command, tmp_path / "log", start_s=1.0):
            pass
    assert _none_soon(str(tmp_path / "alive"))


def _with_a_child(file: Path) -> list[str]:
    """A program whose child makes ``file``; both stay."""
    child = f"import time; open({str(file)!r}, 'w').close(); time.sleep(60)"
    return [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]


def _none_soon(argument: str) -> bool:
    """A process that was killed with its parent is seen for a moment more; those here would live for 60 s."""
    deadline_s = time.monotonic() + 10.0
    while _processes_with(argument) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not _processes_with(argument)


def _processes_with(argument: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if argument in line:
                found.append(line)
    return found


def test_prompts_of_words_are_the_same_tokens_as_text_and_as_ids(words: Words) -> None:
    workload = words.of(random_lengths(num_requests=3, input_len=50, output_len=1, vocab_size=words.vocab_size, seed=1))
    for conversation in workload.conversations:
        token_ids = list(conversation.turns[0].token_ids)
        assert words.encode(words.as_text(token_ids)) == token_ids
        assert len(token_ids) == 50


def test_what_a_workload_shares_its_words_share_too(words: Words) -> None:
    drawn = shared_prefix(
        num_groups=2, per_group=3, prefix_len=40, question_len=5, output_len=1, vocab_size=words.vocab_size, seed=0
    )
    ids, read = (
        [each.turns[0].token_ids[:40] for each in workload.conversations] for workload in (drawn, words.of(drawn))
    )
    assert [ids.index(prefix) for prefix in ids] == [read.index(prefix) for prefix in read]
    assert len(set(read)) == 2
