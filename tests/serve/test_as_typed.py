"""Manta as people start it without `manta serve`, and from where it is hard to start."""

import sys
from pathlib import Path

import pytest

from tests.serve.running import HTTP, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


def test_it_serves_from_a_folder_whose_name_bash_would_split(tmp_path: Path) -> None:
    place = tmp_path / "J\u00f6rg's \"$HOME\" projects"
    place.symlink_to(sys.prefix)
    with serving(tmp_path, replicas={"count": 1}, python=str(place / "bin" / "python")) as running:
        assert running.serves_with(1)
        answer = HTTP.post(f"{running.url}/v1/completions", json={"prompt": "Water is", "max_tokens": 4}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        pythons = [command for command in running.processes().values() if "ray::" in command]
        assert pythons
