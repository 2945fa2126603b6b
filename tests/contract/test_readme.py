"""The documents name every setting, flag and variable that exists, and nothing that does not."""

import dataclasses
import pathlib
import re
import subprocess
import tomllib

import yaml

from dashboards.catalog import CATALOG, POOL_STATES, STAGES
from deployments.command.haproxy import BINARY, FLAGS, WRAPPER
from deployments.command.settings_doc import table
from deployments.places import ROOT, VERSION
from deployments.settings.constants import is_constant
from deployments.settings.groups import AutoscalingSettings
from deployments.settings.schema import AppConfig, parse
from deployments.settings.settings_file import OURS

OPERATE = pathlib.Path("docs/operate.md").read_text()
SETTINGS = pathlib.Path("docs/settings.md").read_text()
BY_HAND = pathlib.Path("docs/log/2026-11-29-gpu-by-hand.md").read_text()
SPECIFICATION = pathlib.Path("docs/specification.md")
CLASSES = pathlib.Path("tests/security/classes.md")
GENERATED = ("settings.md", "metrics.md", "api_fields.md", "specification.md", "way.md", "architectures.md")


def tracked(*patterns: str) -> list[pathlib.Path]:
    """The files of the repository, by the patterns of git."""
    said = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout
    return [pathlib.Path(name) for name in said.splitlines()]


def settings() -> set[str]:
    """Dotted names of every setting of serve_config.yaml's args, groups of more than one level left whole."""
    names = set()
    for group, field in AppConfig.model_fields.items():
        kind = field.annotation
        if dataclasses.is_dataclass(kind):
            names |= {f"{group}.{each.name}" for each in dataclasses.fields(kind)}
        elif hasattr(kind, "model_fields"):
            names |= {f"{group}.{name}" for name in kind.model_fields}
        else:
            names.add(group)
    return {name for name in names if not is_constant(name)}


def test_every_setting_has_a_row_with_a_meaning_and_every_row_is_a_setting() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", table(), flags=re.MULTILINE))
    assert {name for name in rows if name.count(".") < 2} == settings()
    autoscaling = {name.rpartition(".")[2] for name in rows if name.startswith("replicas.autoscaling.")}
    assert autoscaling == {name for name in AutoscalingSettings.model_fields if not is_constant(f"autoscaling.{name}")}
    leaves = {name for name in rows if not name.endswith((".autoscaling", ".cache")) and not name.startswith("decode.")}
    assert len(leaves) <= 75  # those of decode are those of prefill; what nobody has to choose is a constant
    assert [name for name, meaning in rows.items() if len(meaning.split()) < 2] == []


def test_what_is_said_beyond_the_table_is_about_settings_that_exist() -> None:
    groups = "|".join(AppConfig.model_fields)
    named = re.findall(rf"`((?:{groups})\.\w+)", SETTINGS.partition("<!-- end -->")[2])
    assert set(named) - settings() == {"cache.kv_cache_dtype"}  # a name of theirs that is taken


def test_the_table_of_all_settings_is_the_one_that_the_code_gives() -> None:
    """Else: run `manta settings` and put what it prints between the marks."""
    written = SETTINGS.partition("<!-- settings -->\n")[2].partition("<!-- end -->")[0]
    assert written == table()


def test_a_meaning_of_several_lines_is_told_whole() -> None:
    (row,) = (line for line in table().splitlines() if line.startswith("| `model.quantization`"))
    meaning = row.split("|")[4]
    assert "int8:" in meaning
    assert "int4:" in meaning


def test_the_readme_can_be_read_in_ten_minutes() -> None:
    assert len(pathlib.Path("README.md").read_text().splitlines()) <= 150


def test_performance_says_what_holds_and_the_log_has_the_rest() -> None:
    assert len(pathlib.Path("docs/performance.md").read_text().splitlines()) <= 250


def test_nobody_is_told_to_install_manta_from_an_index() -> None:
    """There, that name is somebody else's package, and ours is not published."""
    told = re.compile(r"pip3? install (?:[^\n]*?['\" ])?manta(-serve)?(?![-_\w])|['\"]manta(-serve)?\[")
    files = set(tracked("*.py", "*.md", "*.sh", "*.toml", "*.yaml", "Makefile")) - {
        pathlib.Path(__file__).relative_to(ROOT)
    }
    texts = {str(name): name.read_text() for name in files}
    assert len(texts) > 300
    assert [name for name, text in texts.items() if told.search(text)] == []


def test_links_between_documents_lead_somewhere() -> None:
    """To files that are there, and to headings by the name that GitHub gives them."""
    dead = []
    for page in tracked("*.md"):
        for link in re.findall(r"\]\(([^)\n]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if "://" in link or (target.exists() and not heading):
                continue
            headings = re.findall(r"^#+ (.*)", target.read_text(), flags=re.MULTILINE) if target.is_file() else []
            if heading not in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}:
                dead.append(f"{page}: {link}")
    assert not dead


def sentences(text: str) -> list[str]:
    """Sentences of prose, code as one word: no tables, headings, code blocks or comments."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--[^>]*-->|^(?:    |\||#|!\[)[^\n]*$", "", text, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text)
    words = [re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", " ".join(block.split()))) for block in blocks]
    return [each for block in words for each in re.split(r"(?<=[.!?])[\")*]*\s+", block) if each.strip("-* ")]


def test_no_sentence_is_longer_than_45_words_and_no_page_has_more_than_20_on_average() -> None:
    pages = [page for page in tracked("README.md", "CHANGELOG.md", "docs/*.md") if page.name not in GENERATED]
    lengths = {
        str(page): [len(re.findall(r"[\w'’-]+", each)) for each in sentences(page.read_text())]
        for page in pages
        if "log" not in page.parts
    }
    assert len(lengths) > 20
    assert {page: max(each) for page, each in lengths.items() if each and max(each) > 45} == {}
    assert {page: sum(each) / len(each) for page, each in lengths.items() if each and sum(each) > 20 * len(each)} == {}


def test_no_page_uses_a_word_of_our_own_where_the_field_has_one() -> None:
    """Speculation, pooling, batch requests, resumable streams, KV transfers and tenants above their share."""
    words = ("readouts?", "kept stream", "lines? of (?:a )?batch", "eased", "form begins", "hand-?offs?", "floods?")
    ours = re.compile(rf"\b(?:scheduler[.]drafts|{'|'.join(words)})\b", re.IGNORECASE)
    pages = tracked("README.md", "CHANGELOG.md", "docs/*.md", "dashboards/*.py", "dashboards/ui/*", "deployments/*.py")
    pages = [page for page in pages if "log" not in page.parts and page.suffix in (".md", ".py", ".js", ".html")]
    texts = {str(page): re.sub(r"\]\([^)]*\)", "]", page.read_text()) for page in pages if page.name != "constants.py"}
    used = {page: ours.findall(text) for page, text in texts.items()}
    assert len(used) > 60
    assert {page: words for page, words in used.items() if words} == {}


def rows_of(page: pathlib.Path, number: str) -> dict[str, list[tuple[str, str]]]:
    """File and name of the tests of each row of the tables of ``page`` whose first column is as ``number``. Fails where
    a test is not there, or two rows have one number."""
    lines = re.findall(rf"^\| ({number}) \|(.*)\|$", page.read_text(), flags=re.MULTILINE)
    rows = {row: re.findall(r"`([\w/]+\.py)::(\w+)`", line) for row, line in lines}
    assert len(rows) == len(lines) == len(re.findall(rf"^\| {number} ", page.read_text(), flags=re.MULTILINE))
    named = {(pathlib.Path("tests") / file, test) for tests in rows.values() for file, test in tests}
    texts = {file: file.read_text() for file, _ in named}
    defined = r"^(?:(?:async )?def {}\(|{} = )"
    assert [test for file, test in named if not re.search(defined.format(test, test), texts[file], re.MULTILINE)] == []
    return rows


def test_each_class_of_what_strangers_try_has_a_test_or_a_measurement_and_the_policy_leads_to_them() -> None:
    rows = rows_of(CLASSES, r"\d+")
    assert [int(row) for row in rows] == list(range(1, len(rows) + 1))
    dated = r"^\| (\d+) \|.*\| measured, 20\d\d-\d\d-\d\d: .*; no test, since .* \|$"
    measured = set(re.findall(dated, CLASSES.read_text(), re.MULTILINE))
    assert {row for row, tests in rows.items() if not tests} == measured
    assert len(measured) <= 12
    assert f"[{len(rows)} classes of what strangers try]({CLASSES})" in pathlib.Path("SECURITY.md").read_text()


def test_each_row_of_the_specification_has_a_test_that_exists_and_each_row_that_is_cited_is_there() -> None:
    """Those of the engine, and K1 to K14: where the code differs from the text."""
    rows = rows_of(SPECIFICATION, r"[A-L]\d\d")
    assert [row for row, tests in rows.items() if not tests] == []
    named_in_code = re.compile(r"SPEC ((?:[A-L]\d+(?:, | and |/)?)+)")
    elsewhere = re.findall(r"^\| `(K\d+)` \|", SPECIFICATION.read_text(), flags=re.MULTILINE)
    code = "".join(file.read_text() for file in tracked("*.py"))
    cited = re.findall(r"[A-L]\d+", " ".join(named_in_code.findall(code)))
    assert {*cited} <= {*rows, *elsewhere}


def test_every_document_is_in_the_index() -> None:
    index = pathlib.Path("docs/README.md").read_text()
    pages = [path for path in pathlib.Path("docs").glob("*.md") if path.name != "README.md"]
    assert [path.name for path in pages if f"({path.name})" not in index] == []


def test_every_document_is_in_the_navigation_of_the_site_and_it_names_no_other() -> None:
    """As `make site` checks it, which few machines have installed."""
    navigation = pathlib.Path("mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("not_in_nav:")[0]
    pages = set(map(str, tracked("*.md"))) - {str(page) for page in tracked("docs/log/20*", "dashboards/*", "tests/*")}
    assert set(re.findall(r"- (\S+\.md)$", navigation, flags=re.MULTILINE)) == pages


def test_every_word_of_metrics_is_in_the_word_list() -> None:
    words = pathlib.Path("docs/README.md").read_text().partition("## Words")[2]
    told = {word for row in re.findall(r"^\| ([^|]+) \|", words, flags=re.MULTILINE) for word in row.split(", ")}
    told |= set(re.findall(r"\*([^*]+)\*", words))  # explained beside another
    states = {value.replace("_", " ") for value in dict(CATALOG["scheduler_requests"].labels)["state"]}
    assert states | {*POOL_STATES, *STAGES, "capacity", "utilisation", "occupancy"} <= told


def test_names_of_vllm_and_sglang_are_in_a_table_with_ours_and_ours_exist() -> None:
    rows = re.findall(r"^\| [^|`]+(\| [^|]*`--[^|]*\|.*)$", SETTINGS, flags=re.MULTILINE)
    for theirs, ours in OURS.items():
        flag = f"`--{theirs.replace('_', '-')}`"
        assert [row for row in rows if flag in row and f"`{ours}`" in row], f"{flag} -> `{ours}`"
    assert set(OURS.values()) <= settings()
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", "".join(rows))}
    assert flags == set(OURS)


def test_what_a_cluster_sets_for_haproxy_is_what_make_serve_sets() -> None:
    script = WRAPPER.relative_to(pathlib.Path.cwd())
    assert variables().items() >= FLAGS.items()
    assert f"export {BINARY}=$PWD/{script}\n" in OPERATE


def test_ray_declares_a_node_dead_that_is_silent_for_twelve_seconds() -> None:
    """As docs/operate.md says; a raylet of a busy machine may be silent for three."""
    prefix = "RAY_health_check_"
    told = {name.removeprefix(prefix): int(value) for name, value in variables().items() if name.startswith(prefix)}
    asked_ms = told["failure_threshold"] * (told["timeout_ms"] + told["period_ms"])
    assert (asked_ms, told["timeout_ms"]) == (12_000, 3_000)


def variables() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(\S+)", pathlib.Path("deploy/manta.env").read_text(), flags=re.MULTILINE))


def test_the_settings_that_are_made_by_hand_for_a_gpu_are_settings(tmp_path: pathlib.Path) -> None:
    """With sed, of our files."""
    for name, wanted in (("gpu", {"gpus": 1.0, "count": 1}), ("apart", {"gpus": 0.5})):
        (command,) = re.findall(rf"sed -e(?:(?!\bsed\b).)*?> {name}\.yaml", BY_HAND, flags=re.DOTALL)
        subprocess.run(["bash", "-c", f"verify=last; {command.replace('> ', f'> {tmp_path}/')}"], check=True)
        args = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["applications"][0]["args"]
        assert parse(args).scheduler.max_running_requests is None
        assert {key: getattr(parse(args).replicas, key) for key in wanted} == wanted


def test_the_versions_that_go_together_are_those_of_the_project() -> None:
    section = OPERATE.partition("## Versions that go together")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| .* \| `(\S*[<>=]\S*)` \|", section, flags=re.MULTILINE))
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    asked = {*project["dependencies"], *project["optional-dependencies"]["gpu"], project["requires-python"]}
    assert told <= asked
    assert {each for each in asked if "==" in each} <= told
    assert f"| with Manta {VERSION} |" in section
    assert re.findall(r"^## (\S+)", pathlib.Path("CHANGELOG.md").read_text(), flags=re.MULTILINE)[0] == VERSION
