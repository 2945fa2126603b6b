"""Whether HAProxy serves: by what is there and what the environment says, and what is said where it does not."""

import stat
import subprocess
from pathlib import Path

import pytest

from deployments import haproxy

ENABLE, BINARY = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BINARY_PATH"
LOOPBACK_RAY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def script(path: Path, *, status: int) -> str:
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def works(tmp_path: Path) -> str:
    return script(tmp_path / "haproxy", status=0)


def test_where_it_is_found_serve_is_told_so_and_its_files_are_nobody_elses(works: str) -> None:
    said: list[str] = []
    environ = {BINARY: works}
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert (environ[ENABLE], environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"]) == ("1", "1")
        folder = Path(environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert environ["RAY_SERVE_HAPROXY_METRICS_PORT"] != environ["RAY_SERVE_HAPROXY_STATS_PORT"]
    assert said == []
    assert not folder.exists()


def test_it_runs_without_splicing_so_that_it_sees_clients_leave(tmp_path: Path) -> None:
    given = tmp_path / "haproxy"
    given.write_text('#!/bin/sh\necho "$@"\n')
    given.chmod(0o755)
    environ = {BINARY: str(given)}
    with haproxy.prepared(environ, host="127.0.0.1", warn=print):
        told = subprocess.run([environ[BINARY], "-db", "-f", "a b"], capture_output=True, text=True, check=True)
    assert told.stdout == "-dS -db -f a b\n"


def test_what_listens_on_the_loopback_alone_makes_a_ray_on_the_loopback(works: str) -> None:
    """Serve has HAProxy connect to the node's address, where a router that listens on 127.0.0.1 is not."""
    for host, there in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        environ = {BINARY: works}
        with haproxy.prepared(environ, host=host, warn=print):
            assert (LOOPBACK_RAY in environ) == there


def test_one_that_does_not_run_is_said_in_one_line_and_serves_own_proxy_serves(tmp_path: Path) -> None:
    said: list[str] = []
    environ = {BINARY: script(tmp_path / "haproxy", status=1)}
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        pass
    assert environ == {BINARY: f"{tmp_path}/haproxy", ENABLE: "0"}
    [line] = said
    assert "Serve's own proxy serves" in line
    assert f"{tmp_path}/haproxy does not run" in line
    assert "\n" not in line


@pytest.mark.parametrize("environ", [{ENABLE: "0"}, {"RAY_ADDRESS": "auto"}])
def test_one_that_is_not_wanted_or_a_cluster_that_runs_changes_nothing(environ: dict[str, str]) -> None:
    said: list[str] = []
    given = dict(environ)
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert environ == given
    assert said == []


def test_what_the_environment_says_already_stays(works: str) -> None:
    environ = {BINARY: works, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0", "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
    with haproxy.prepared(environ, host="127.0.0.1", warn=print):
        assert (environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"], environ["RAY_SERVE_HAPROXY_STATS_PORT"]) == ("0", "8404")


def test_the_host_is_read_from_the_settings_file_and_serves_default_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    for text, host in (("http_options: {host: 127.0.0.1}", "127.0.0.1"), ("{}", "0.0.0.0"), (":\n- :", "0.0.0.0")):
        file.write_text(text)
        assert haproxy.host_of(str(file)) == host
    assert haproxy.host_of(str(tmp_path / "none.yaml")) == "0.0.0.0"
