"""The requests of docs/cookbook.md and docs/structured_output.md, pasted: each prints what the page says.

A ```text block is what the block of commands or code above it prints; `...` in it stands for anything. The blocks of
one language are one program, over a real engine in this process.
"""

import asyncio
import re
import sys

import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.places import ROOT
from tests.programs import program
from tests.unit.deployments.listening import listening

pytestmark = pytest.mark.model

BLOCK = re.compile(r"^```(bash|python|js)\n(.*?)^```\n\n^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BETWEEN = {
    "bash": "printf '\\036'\n",
    "python": "print(end=chr(30), flush=True)\n",
    "js": "process.stdout.write(String.fromCharCode(30));\n",
}


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The language, the code, and what it prints, of each block of a page."""
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def interpreter(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-"]
    if language == "js":
        return [program("node", "nodejs"), "--input-type=module", "-"]
    return [program("bash", "bash")]


def pattern(printed: str) -> str:
    return ".*?".join(map(re.escape, printed.strip().split("...")))


@pytest.mark.parametrize(
    ("page", "language"),
    [
        ("cookbook.md", "bash"),
        pytest.param("cookbook.md", "python", marks=pytest.mark.slow),  # its library takes seconds to import
        ("cookbook.md", "js"),
        ("structured_output.md", "bash"),
    ],
)
async def test_a_request_that_is_pasted_prints_what_the_page_says(service: Service, page: str, language: str) -> None:
    told = [(code, printed) for each, code, printed in blocks(page) if each == language]
    assert len(told) >= 3
    async with listening(make_app(service)) as port:
        script = BETWEEN[language].join([*(code for code, _ in told), ""])
        process = await asyncio.create_subprocess_exec(
            *interpreter(language), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        script = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        said, _ = await asyncio.wait_for(process.communicate(script.encode()), 300)
    outputs = said.decode().replace("\r\n", "\n").split("\036")
    for (code, printed), output in zip(told, outputs, strict=False):
        assert re.fullmatch(pattern(printed), output.strip(), re.DOTALL), f"{code}\nprinted\n{output}\nnot\n{printed}"
    assert (len(outputs), outputs[-1]) == (len(told) + 1, "")


def test_every_block_of_the_cookbook_says_what_it_prints() -> None:
    page = (ROOT / "docs" / "cookbook.md").read_text()
    assert len(re.findall(r"^```(?:bash|python|js)$", page, re.MULTILINE)) == len(blocks("cookbook.md"))
