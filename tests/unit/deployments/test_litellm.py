"""LiteLLM itself as the client, from its own environment: it needs older packages than Manta's (`make tools-test`)."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from deployments.http.http_app import make_app
from deployments.http.service import Service
from tests.programs import REQUIRED

PYTHON = Path(__file__).parents[3] / ".tools/clients/bin/python"
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists() and REQUIRED not in os.environ, reason="LiteLLM is not installed: run `make tools-test`"
    ),
]
ASK = """
import json, sys, litellm
for ask in json.load(sys.stdin):
    kind = litellm.text_completion if "prompt" in ask else litellm.completion
    try:
        kind(**ask, api_key="none", num_retries=0)
        print("answered")
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.fixture
async def url(service: Service) -> AsyncIterator[str]:
    """The app behind a socket."""
    server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    await serving


async def outcomes(url: str, asks: list[dict[str, Any]]) -> list[str]:
    """What LiteLLM makes of each of ``asks``: the class of its exception, or "answered"."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-c", ASK, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        told, _ = await process.communicate(json.dumps([{**ask, "api_base": url} for ask in asks]).encode())
    return [line for line in told.decode().splitlines() if line == "answered" or line.endswith("Error")]


async def test_litellm_knows_every_overflow_of_the_context_and_nothing_else(url: str) -> None:
    """So that its fallbacks and trimming begin: 8,192 tokens are the context, 8,190 behind a short prompt too many."""
    long = [{"role": "user", "content": "word " * 9000}]
    short = [{"role": "user", "content": "hi"}]
    name = "SmolLM2-135M-Instruct"
    overflows: list[dict[str, Any]] = [
        {"model": f"openai/{name}", "messages": long},
        {"model": f"hosted_vllm/{name}", "messages": long, "stream": True},
        {"model": f"openai/{name}", "messages": short, "max_tokens": 8190},
        {"model": f"text-completion-openai/{name}", "prompt": "word " * 9000},
        {"model": f"text-completion-openai/{name}", "prompt": "hi", "max_tokens": 8192},
    ]
    others: list[dict[str, Any]] = [
        {"model": f"openai/{name}", "messages": short, "max_tokens": 1},
        {"model": f"openai/{name}", "messages": short, "temperature": -1},
    ]
    told = await outcomes(url, overflows + others)
    assert told == ["ContextWindowExceededError"] * 5 + ["answered", "BadRequestError"]
