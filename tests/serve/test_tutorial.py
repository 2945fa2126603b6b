"""docs/tutorial.md as a reader follows it: every command is run on a real Manta, and prints what the page says.

    python -m tests.serve.test_tutorial     runs it and puts what is printed into the page

A ```bash block is commands; the ```text block behind it is what they print. A ```sh block with `make serve` starts an
application; what follows runs against it. Compared are words, token counts and numbers of requests; times, rates, ids
and bars only by their form. Within one block the same id must stand for the same thing; a tie goes to any replica.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deployments.places import ROOT
from routing.explain import BECAUSE
from routing.types import Reason
from tests.programs import program
from tests.serve.running import Running, free_port, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "tutorial.md"
FOLDER = "/tmp/manta-tutorial"
START = re.compile(r"^```sh\nmake serve(?: CONFIG=(\S+))?\n```$", re.MULTILINE)
BLOCK = re.compile(r"^```bash\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
SMALL = {"replicas": {"cpus": 1}, "cache": {"max_total_tokens": 12_000}}
# counts that are the same everywhere; a prompt of few tokens may have those behind it that came before a kill
EXACT = re.compile(
    r"(?:\b\d[\d,]*(?= (?:tokens: \d|tokens are|tries|try|cached|computed|pages)\b)|\b\d+(?= of \d+ prompt tokens)"
    r"|\b\d{3,}(?= prompt tokens)|(?<=^prompt )\d+|(?<=_tokens\":)\d+|(?<==> )\d+|^\d+$)"
)
NUMBER = re.compile(r"\d[\d,.]*(?: ?(?:ms|s|min|kB|MB|GB|k|M)\b)?")
# between two idle replicas without the prefix: free pages decide, or rates that were measured, or a draw
IDLE = (Reason.SOONEST, Reason.MORE_FREE, Reason.TIE)
EITHER = re.compile(
    rf"(?:{'|'.join(BECAUSE[reason] for reason in IDLE)})(?=\. 0 tokens are predicted)"
    rf"|(?<=\(estimated_ttft, )(?:{'|'.join(reason.value for reason in IDLE)})(?=\)$)"
)
# ids of replicas and routers, by what stands around them: some look like words
NAMED = re.compile(
    r"(?:\brouter |\bwent to |\bprefill=|\b(?:on|by) |^>? +)([a-z0-9]{8})"
    r"(?=$| by | +replica| +unified| +prefill| +decode| +\d| \(|\. |;)",
    re.MULTILINE,
)


def parts(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """By application: its settings file, and each block of commands with what it prints."""
    pieces = START.split(page)
    configs, texts = [config or "serve_config.yaml" for config in pieces[1::2]], pieces[2::2]
    return [(config, BLOCK.findall(text)) for config, text in zip(configs, texts, strict=True)]


def run(commands: list[str], app: Running, folder: Path) -> list[str]:
    """Run each in one shell; return what each printed, with the page's own addresses."""
    prometheus = free_port()
    here = {"127.0.0.1:8000": f"127.0.0.1:{app.port}", "127.0.0.1:9090": f"127.0.0.1:{prometheus}", FOLDER: str(folder)}
    lines = ["exec 2>&1", "trap 'kill $(jobs -p) 2> /dev/null' EXIT"]
    for command in commands:
        for page, actual in here.items():
            command = command.replace(page, actual)
        command = re.sub(r"\bmanta (explain|chat)", rf"manta \1 --url {app.url}", command)
        command = re.sub(r"(dashboards export \S+)", rf"\1 --url {app.url}/manta", command)
        lines += [command, "printf '\\036'"]
    script = folder / "tutorial.sh"
    script.write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = folder / "told.txt"  # not a pipe: what runs on would keep it open
    with told.open("w") as out:
        subprocess.run(["bash", str(script)], cwd=ROOT, env=environment, stdout=out, check=False, timeout=400)
    said = told.read_text()
    for page, actual in here.items():
        said = said.replace(actual, page)
    return said.split("\036")[: len(commands)]


def followed(folder: Path) -> list[tuple[str, str]]:
    """Follow the page; return of each block what it should print and what it printed."""
    program("prometheus", "prometheus")
    found = []
    for number, (config, blocks) in enumerate(parts(PAGE.read_text())):
        own = folder / str(number)
        own.mkdir()
        settings = SMALL if "disaggregated" in config else {**SMALL, "replicas": {"cpus": 1, "count": 2}}
        with serving(own, base=config, observatory=True, **settings) as app:
            app.until(lambda: app.serves_with(2), 60)
            said = run([commands for commands, _ in blocks], app, own)
        found += [(wanted, actual) for (_, wanted), actual in zip(blocks, said, strict=True)]
    return found


def formed(text: str, ids: dict[str, int]) -> list[str]:
    """The lines of ``text``, sorted, with what may differ replaced: ids by their order, numbers by #."""
    lines = []
    for each in NAMED.findall(text):
        ids.setdefault(each, len(ids))
    for line in text.strip().splitlines():
        line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", line)
        line = re.sub(r" Of \d+ tokens that were drafted, \d+ came true\.", "", line)  # steps' times decide
        for name, number in ids.items():
            line = line.replace(name, f"ID{chr(97 + number)}")
        line = re.sub(r"\[[ =]*\]", "BAR", line)
        if ": 0 cached" in line or ". 0 tokens are predicted" in line:
            line = EITHER.sub("EITHER", line)
        kept: list[str] = EXACT.findall(line)
        line = NUMBER.sub("#", EXACT.sub("@", line))
        for each in kept:
            line = line.replace("@", each, 1)
        lines.append(" ".join(line.split()))
    return sorted(lines)  # candidates stand by their ids, or the best first


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return followed(tmp_path_factory.mktemp("tutorial"))


def test_every_command_of_the_tutorial_prints_what_the_page_says(blocks: list[tuple[str, str]]) -> None:
    """Else: `python -m tests.serve.test_tutorial`, and read what it changed."""
    pairs = [(formed(wanted, {}), formed(actual, {})) for wanted, actual in blocks]
    lines = [f"-{line}" for wanted, actual in pairs for line in wanted if line not in actual]
    lines += [f"+{line}" for wanted, actual in pairs for line in actual if line not in wanted]
    assert all(wanted == actual for wanted, actual in pairs), "\n".join(lines)
    assert len(blocks) >= 10


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="manta-tutorial-") as name:
        said = iter(followed(Path(name)))

    def told(found: re.Match[str]) -> str:
        actual = next(said)[1].strip("\n")
        lines = "\n".join(line.rstrip() for line in actual.splitlines())
        return found[0] if found[2] is None else f"```bash\n{found[1]}```\n\n```text\n{lines}\n```"

    PAGE.write_text(BLOCK.sub(told, PAGE.read_text()))


if __name__ == "__main__":
    main()
