"""``manta chat``: a conversation with a running Manta, and after each answer what the cache did for it; ``manta run``:
the same with a Manta that starts and ends with it.

On a terminal a prompt with a history of lines; elsewhere each line of standard input is a turn, answers go to standard
output, and all else to standard error.

Owns:      the messages of the conversation, which nothing else keeps; the process that `serving` starts.
Invariant: a turn that failed leaves no message behind; one that was stopped (Ctrl-C) keeps what came of its answer.
"""

import contextlib
import importlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from deployments.watch.terminal import ask, explain
from deployments.watch.terminal.table import count, seconds
from deployments.watch.terminal.words import short_id

COMMANDS = "/explain why it went where it went   /new forget the conversation   /quit"
STOPPED = "(stopped)"
READY = re.compile(r" ready: .* at (http://\S+)/v1$")  # the line of `manta serve` when a model answers
STOP_S = 60.0  # for a Manta to end what it started


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What was typed behind ``chat``."""

    model: str | None  # None: the first that is served
    system: str | None
    max_tokens: int
    temperature: float | None  # None: the model's own


@dataclass(slots=True)
class ChatTurn:
    """What is known of one answer, while it comes and afterwards."""

    rid: str = ""
    route: Mapping[str, str] = field(default_factory=dict)  # of x-manta-route
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_s: float | None = None  # from the question to the first text, of reasoning too
    last_s: float | None = None


class Conversation:
    """The messages so far, and the last turn."""

    def __init__(self, url: str, key: str | None, options: ChatOptions, clock: Callable[[], float]) -> None:
        """Raises: Unanswered if no model is given and Manta lists none."""
        self.model = options.model or ask.first_model(url, key)
        self.last: ChatTurn | None = None
        self._url, self._key, self._options, self._clock = url, key, options, clock
        self._messages: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the system message alone."""
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> Iterator[str]:
        """Send a turn; yield the parts of its answer as they come. Raises: Unanswered."""
        turn, asked_s = ChatTurn(), self._clock()
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            with ask.answer(self._url, self._body(messages), self._key) as (headers, lines):
                turn.rid, turn.route = headers.get("x-request-id", ""), fields_of(headers.get("x-manta-route", ""))
                for event in events(lines):
                    if "error" in event:
                        raise ask.Unanswered(f"the answer broke off: {event['error'].get('message')}", ask.UNREACHABLE)
                    turn.usage = event.get("usage") or turn.usage
                    deltas = [each["delta"] for each in event.get("choices", ())]
                    part = "".join(each.get("content") or "" for each in deltas)
                    if part or any(each.get("reasoning_content") for each in deltas):  # its tokens count in usage too
                        turn.last_s = self._clock() - asked_s
                        turn.first_s = turn.last_s if turn.first_s is None else turn.first_s
                    if part:
                        turn.text += part
                        yield part
        except ask.Unanswered:
            raise
        except BaseException:  # Ctrl-C, or the reader left
            self._keep(messages, turn)
            raise
        self._keep(messages, turn)

    def _keep(self, messages: list[dict[str, str]], turn: ChatTurn) -> None:
        self.last, self._messages = turn, [*messages, {"role": "assistant", "content": turn.text}]

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "max_tokens": self._options.max_tokens, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        return body if self._options.temperature is None else {**body, "temperature": self._options.temperature}


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Read server-sent events until [DONE]."""
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            yield json.loads(data)


def fields_of(header: str) -> dict[str, str]:
    """Read x-manta-route: NAME=VALUE; ..."""
    return dict(part.split("=", 1) for part in header.split("; ") if "=" in part)


def facts(turn: ChatTurn) -> str:
    """Return in one line what the cache did, how fast it was, and where it went; what is not known is left out."""
    said = []
    if turn.usage:
        prompt = turn.usage.get("prompt_tokens", 0)
        cached = (turn.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        said.append(f"prompt {count(prompt)} tokens: {count(cached)} cached, {count(prompt - cached)} computed")
    if turn.first_s is not None:
        said.append(f"first token {seconds(turn.first_s)}")
    output = turn.usage.get("completion_tokens", 0)
    if turn.first_s is not None and turn.last_s is not None and output > 1 and turn.last_s > turn.first_s:
        said.append(f"{count(output)} tokens at {count((output - 1) / (turn.last_s - turn.first_s))}/s")
    if turn.route:
        prefill = turn.route.get("prefill", "local")
        by = "" if prefill == "local" else f", prompt by {short_id(prefill)}"
        tries = f", {turn.route['tries']} tries" if turn.route.get("tries", "1") != "1" else ""
        why = f"{turn.route.get('policy', '?')}, {turn.route.get('reason', '?')}"
        said.append(f"on {short_id(turn.route.get('replica'))} ({why}){by}{tries}")
    return " | ".join(said)


def run(url: str, key: str | None, admin_key: str | None, options: ChatOptions) -> int:
    """Run the command. Return the exit status: 0, or that of the first turn that failed (ask.py)."""
    live = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        talk = Conversation(url, key, options, time.monotonic)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    told = Console(stderr=not live, highlight=False, soft_wrap=True)
    if live:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then has arrows and a history
        told.print(Text(f"{talk.model} at {url}. {COMMANDS}", "bright_black"))
    status = 0
    for line in _typed() if live else sys.stdin:
        if not (text := line.strip()):
            continue
        if text == "/quit":
            break
        failed = _command(text, talk, url, admin_key, told) if text.startswith("/") else _turn(text, talk, told)
        status = status or failed
    return status


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """Run ``command``, which is `manta serve`, and print what it says until it is ready; end it with the block. It gets
    no Ctrl-C, which stops an answer here. Gives: its address.

    Raises: Unanswered with its exit status if it ends before.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            found = None
            while found is None:
                if not (line := process.stdout.readline()):
                    raise ask.Unanswered("nothing is served; the lines above say why", process.wait())
                print(line, end="", file=sys.stderr, flush=True)
                found = READY.search(line)
            rest = process.stdout  # what it says from now on: a full pipe would stop it
            threading.Thread(target=lambda: deque(rest, maxlen=0), daemon=True, name="said").start()
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
            finally:  # after another Ctrl-C too
                process.kill()


def _typed() -> Iterator[str]:
    """Yield the lines that are typed, until the end of input (Ctrl-D) or Ctrl-C."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("\n> ")
    print()


def _command(text: str, talk: Conversation, url: str, admin_key: str | None, told: Console) -> int:
    if text == "/new":
        talk.forget()
        told.print(Text("a new conversation", "bright_black"))
    elif text == "/explain" and talk.last is not None:
        try:
            told.print(explain.asked(url, talk.last.rid, admin_key))
        except ask.Unanswered as error:
            told.print(Text(str(error), "red"))
            return error.status
    else:
        told.print(Text("there is no answer yet" if text == "/explain" else COMMANDS, "bright_black"))
    return 0


def _turn(text: str, talk: Conversation, told: Console) -> int:
    """Print the answer of one turn as it comes, and its facts. Return 0, or the status of its failure."""
    try:
        for part in talk.say(text):
            print(part, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(f" {STOPPED}", flush=True)
        return 0
    except ask.Unanswered as error:
        print(flush=True)
        told.print(Text(str(error), "red"))
        return error.status
    if talk.last is not None:
        told.print(Text(facts(talk.last), "bright_black"))
    return 0
