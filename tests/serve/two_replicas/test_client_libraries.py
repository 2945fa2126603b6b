"""What client libraries make of two replicas of SmolLM2, each from its own process and environment (tests/clients).

A model of 135M parameters fills in forms; what it fills in is nonsense. So documents and calls are held to their types,
which the libraries check, and ways of asking for the same to each other.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deployments.places import ROOT
from tests.programs import REQUIRED
from tests.serve.running import Running

PYTHON = ROOT / ".tools/clients/bin/python"
ASKS = Path(__file__).parents[2] / "clients/asks.py"
NAME = "SmolLM2-135M-Instruct"
pytestmark = [
    pytest.mark.serve,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not PYTHON.exists() and REQUIRED not in os.environ,
        reason="the client libraries are not installed: run `make tools-test`",
    ),
]


def asked(app: Running, library: str) -> dict[str, Any]:
    """What ``library`` was answered."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [PYTHON, ASKS, library, app.url, NAME], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def is_order(document: dict[str, Any]) -> bool:
    return set(document) == {"customer", "lines", "urgent"} and 1 <= len(document["lines"]) <= 2


def are_look_ups(calls: list[Any]) -> bool:
    """One call or several of the tool, with the arguments that it has."""
    return bool(calls) and all(
        name == "look_up_stock" and arguments["part"] in ("bolt", "nut") and isinstance(arguments["shelf"], int)
        for name, arguments in calls
    )


def test_openai(app: Running) -> None:
    said = asked(app, "openai")
    assert are_look_ups(said["calls"])
    assert said["streamed calls"] == said["calls"]
    assert said["finish reasons"] == ["tool_calls", "tool_calls"]
    assert is_order(said["parsed"])
    assert said["response parsed"] == said["parsed"]
    assert are_look_ups(said["response calls"])
    assert said["response events"] == ["response.created", "response.completed"]
    assert said["response text"] == said["chat text"]


def test_anthropic(app: Running) -> None:
    said = asked(app, "anthropic")
    assert said["text"] == said["streamed text"]
    assert said["stop reasons"] == ["end_turn", "end_turn"]
    assert are_look_ups(said["calls"])
    assert said["streamed calls"] == said["calls"]
    assert said["call stop reason"] == "tool_use"
    assert said["counted"] == said["used"]


def test_instructor(app: Running) -> None:
    said = asked(app, "instructor")
    assert is_order(said["TOOLS"])
    assert is_order(said["JSON_SCHEMA"])


def test_pydantic_ai(app: Running) -> None:
    said = asked(app, "pydantic-ai")
    assert is_order(said["by tool"])
    assert is_order(said["native"])
    assert len(said["returned"]) == len(said["asked"]), "each call of the function was answered"


def test_langchain(app: Running) -> None:
    said = asked(app, "langchain")
    assert is_order(said["json_schema"])
    assert is_order(said["function_calling"])
    assert are_look_ups(said["calls"])
    assert said["streamed calls"] == said["calls"]


def test_litellm(app: Running) -> None:
    said = asked(app, "litellm")
    assert are_look_ups(said["calls"])
    assert is_order(said["document"])
    finish_reason, text = said["json object"]
    assert finish_reason == "length" or isinstance(json.loads(text), dict)
