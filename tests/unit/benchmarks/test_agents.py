"""The bench of agents' sessions on a tiny random model: every way of keeping their pages is there."""

import json
from pathlib import Path

from benchmarks import agents
from tests.numerics import tiny
from tests.unit.tokenizer_folders import byte_level_folder


def test_a_quick_run_counts_hits_sessions_and_first_tokens_of_every_way(tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    tiny.save("llama", tmp_path, vocab_size=512, max_position_embeddings=1024)
    agents.main(["--quick", "--threads", "1", "--model", str(tmp_path), "--json", str(tmp_path / "rows.json")])
    rows = {row["name"]: row["value"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for way in agents.WAYS:
        assert 0 < rows[f"{way}: agents' hit rate"] < 1
        assert rows[f"{way}: sessions a minute"] > 0
        for kind in ("agent", "chat"):
            assert 0 < rows[f"{way}: {kind}s' first token, median"] <= rows[f"{way}: {kind}s' first token, p95"]
        beside, alone = rows[f"{way}: chats' first token, p95"], rows[f"{agents.ALONE}: chats' first token, p95"]
        assert rows[f"{way}: chats' p95, beside agents / alone (<= 1.05)"] == beside / alone
    assert rows["lru, host tier: agents' hit rate"] > rows["lru: agents' hit rate"]
