"""The `manta` command line: what its help names, the nearest command, and what is passed on."""

import importlib
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import __main__ as command_line
from deployments.command import announce, arguments, serve
from deployments.command.arguments import CONFIG
from deployments.places import ROOT, VERSION
from deployments.settings.schema import parse
from deployments.settings.settings_file import CommandLine, SettingChange
from deployments.tenancy.keys import read_keys
from replicas.errors import InvalidConfig

COMMANDS = (
    "serve", "check", "top", "explain", "kill", "chat", "logs", "list", "pull", "doctor", "key", "bench", "batch",
    "adapters", "dashboards",
)  # fmt: skip


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int | str | None, str, str]:
    """Exit status, standard output and standard error."""
    status: int | str | None
    try:
        status = command_line.main(words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_console_command_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"manta": "deployments.__main__:main"}


def test_the_version_is_in_one_place_which_needs_no_installation() -> None:
    """What is installed may be an older checkout, or have another name: ``manta`` on the index is somebody else's."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert whole["project"]["name"] == "manta-serve"
    module, _, name = whole["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == VERSION


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, "--help")
    assert status == 0
    assert [each for each in COMMANDS if f"\n    {each}" not in out] == []
    assert told(capsys) == (0, out, "")  # without a word
    assert "export" in told(capsys, "dashboards", "--help")[1]  # it has commands of its own


def test_a_new_key_is_long_another_each_time_and_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    (status, one, said), (_, two, _) = told(capsys, "key", "new"), told(capsys, "key", "new")
    assert (status, len(one.strip()), one == two) == (0, 32, False)
    assert read_keys(api_key_file=None, admin_key=one, environ={"MANTA_API_KEYS": two}).short == ()
    assert "MANTA_API_KEYS" in said
    assert "MANTA_ADMIN_KEY" in said


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "dashboards"])
def test_the_help_of_a_command_has_an_example_that_its_own_parser_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = told(capsys, command, "--help")
    example = out.partition("example:\n")[2].strip()
    assert status == 0
    assert arguments.parse(example.rpartition("manta ")[2].split()).command == command


@pytest.mark.parametrize(("word", "meant"), [("tpo", "top"), ("server", "serve"), ("docter", "doctor"), ("talk", "")])
def test_an_unknown_command_names_the_nearest(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = told(capsys, word)
    assert status == 2
    assert ("choose from" in err) == (not meant)
    assert meant == "" or f"there is no command {word!r}; did you mean {meant!r}?" in err


def test_an_empty_address_of_a_cluster_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setenv("RAY_ADDRESS", "")
    for name in ("RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "no_grpc_proxy"):  # put back at the end
        monkeypatch.setenv(name, os.environ.get(name, "x"))
    monkeypatch.setattr(serve, "check", lambda _: asked.append(os.environ.get("RAY_ADDRESS")) or 7)
    assert command_line.main(["check", str(ROOT / CONFIG)]) == 7
    assert asked == [None]


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """As in `manta top --once | head -1`; argparse writes the first by itself."""
    for words in (["--version"], ["key", "new"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "deployments", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (command_line.BROKEN_PIPE, "")
    shell = ["bash", "-c", f"exec {sys.executable} -m deployments key new >&-"]  # closed from the beginning
    closed = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (closed.returncode, "Traceback" in closed.stderr) == (0, False)


def test_versions_are_those_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, "--version")
    assert status == 0
    assert out.startswith(f"manta {VERSION} (ray {metadata.version('ray')}, ")


def test_a_model_alone_stands_for_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever ends as a settings file does not is a model."""
    port = SettingChange("http_options.port", 9, "--port 9")
    for words in (["m"], ["--model", "m"], ["--model-path", "m"]):
        assert arguments.parse(["check", *words, "--port", "9"]).config == CommandLine(
            "m", is_model=True, changes=(port,)
        )
    assert (arguments.parse(["doctor"]).config, arguments.parse(["serve", "a.yaml"]).config) == (CONFIG, "a.yaml")
    again = ["--model", "m", "--port=9"]
    assert arguments.parse(["check", *again]).config.words == again
    assert arguments.parse(["check", "Makefile"]).config == "Makefile"  # a file without the ending
    assert arguments.parse(["serve", "a.yaml", "--port", "9"]).config == CommandLine("a.yaml", changes=(port,))
    for words, says in (
        (["a.yaml", "--model", "m"], "two things to serve"),
        (["m", "--disaggregate", "2"], "such as 1:2, got '2'"),
        (["m", "--tp", "{"], "'{' is not a value"),
        (["m", "--enable-prefix-caching"], "here it is cache.prefix_cache"),
        ([""], "an empty word names no model"),
    ):
        status, _, err = told(capsys, "serve", *words)
        assert (status, says in err) == (2, True), err


def test_a_model_alone_is_served_as_by_the_file_of_the_project() -> None:
    file = yaml.safe_load((ROOT / CONFIG).read_text())
    alone = CommandLine(file["applications"][0]["args"]["model"]["path"], is_model=True).read().content
    of_file, of_model = (parse(each["applications"][0].pop("args")) for each in (file, alone))
    assert alone == file
    [of_hub, _] = CommandLine("owner/name", is_model=True).read().content["applications"]
    assert of_hub["args"]["model"]["path"] == "owner/name"
    assert of_model.model_dump(exclude={"model"}) == of_file.model_dump(exclude={"model"})


def test_every_flag_gives_its_setting_by_each_of_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    """As a number, a word or a size; what is printed can be read back, and is what the flags say."""
    words = {"--host": "::1", "--port": "9", "--ctx": "512", "--replicas": "2", "--gpus": "0", "--memory": "2GiB",
             "--mem-fraction-static": "0.5", "--store": "kv", "--dtype": "bfloat16", "--cpus": "1"}  # fmt: skip
    for flag in arguments.FLAGS:
        word = words.get(flag.name, "8" if flag.metavar in ("N", "TOKENS") else "lpm")
        for name in flag.names:
            status, out, err = told(capsys, "serve", "m", name, word, "--print-config")
            assert status == 0, err
            made = yaml.safe_load(out)
            *groups, setting = flag.setting.split(".")
            group = made if groups == ["http_options"] else made["applications"][0]["args"]
            for each in groups:
                group = group[each]
            assert group[setting] == flag.read(word)
            args = made["applications"][0]["args"]
            if word != "lpm":
                parse(args)
            else:  # a name of another table
                assert "is unknown" not in str(_wrong(args))


def _wrong(args: dict[str, Any]) -> InvalidConfig | None:
    try:
        parse(args)
    except InvalidConfig as error:
        return error
    return None


def test_flags_change_a_file_and_are_named_where_they_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text((ROOT / CONFIG).read_text())
    status, out, _ = told(capsys, "serve", str(file), "--disaggregate", "1:2", "--print-config")
    args = yaml.safe_load(out)["applications"][0]["args"]
    assert (status, args["mode"], args["prefill"], args["decode"]) == (0, "disaggregated", {"count": 1}, {"count": 2})
    assert args["scheduler"] == yaml.safe_load(file.read_text())["applications"][0]["args"]["scheduler"]
    status, _, err = told(capsys, "check", str(file), "--ctx", "-5")
    assert (status, "  --ctx -5: model.context_len: must be at least 1, not -5" in err) == (2, True), err
    file.write_text("applications: []")
    status, _, err = told(capsys, "check", str(file), "--ctx", "5")
    assert (status, "flags change the settings of one application, and it has 0" in err) == (2, True), err


def test_bench_takes_a_time_in_seconds_minutes_or_hours(capsys: pytest.CaptureFixture[str]) -> None:
    told_s = {word: arguments.parse(["bench", "--for", word]).for_s for word in ("90", "90s", "5m", "1h")}
    assert told_s == {"90": 90.0, "90s": 90.0, "5m": 300.0, "1h": 3600.0}
    for word in ("", "s", "0s", "-5s", "1.5m", "5d"):
        status, _, err = told(capsys, "bench", f"--for={word}")
        assert (status, "must be a time such as 90s or 5m" in err) == (2, True), err
    status, _, err = told(capsys, "bench", "--concurrency", "0")
    assert (status, "must be 1 or more, got 0" in err) == (2, True), err


def test_a_month_that_is_none_is_an_error_and_not_one_without_requests(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("2026-1", "2026-13", "2026", "2026-11-01", "last", ""):
        status, _, err = told(capsys, "key", "usage", "--month", word)
        assert (status, f"--month: must be a month such as 2026-11, got {word!r}" in err) == (2, True), err


def test_the_box_of_a_start_names_the_command_as_it_can_be_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert announce.program() == ".venv/bin/python -m deployments"
    python.with_name("manta").touch(mode=0o755)
    assert announce.program() == ".venv/bin/manta"
    monkeypatch.setenv("PATH", str(python.parent))
    assert announce.program() == "manta"
