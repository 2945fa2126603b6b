"""How large a thing may be: the limits that keep the house readable. An exception needs its reason.

Other serving systems grew past repair by attributes on shared objects first, then by files with
one importer. Comments that ask for restraint do not hold; a test does.
"""

import ast
import collections
import functools
import pathlib
import re
from collections.abc import Mapping

import pytest

from tests import way
from tests.contract.test_floors import ROOT, UNITS
from tools import diagrams, house
from tools.house import imports

ATTRIBUTES = {
    "replicas.request.Req": 25,
    "replicas.scheduler.scheduler.Scheduler": 12,
    "replicas.engine.engine.Engine": 16,
    "replicas.cache.node.TreeNode": 19,  # what each tier and each order of eviction knows of a node
}
ATTRIBUTES_OTHERWISE = 18
METHODS = {
    "replicas.cache.kv.KvCache": 25,
    "replicas.engine.engine.Engine": 40,
    "replicas.scheduler.scheduler.Scheduler": 35,
    "deployments.fleet.fleet.Fleet": 39,
    "deployments.batches.store.BatchStore": 38,
}
METHODS_OTHERWISE = 30
# what of these can change: their attributes, and those of the parts of the same room (a file that stands outside all
# rooms is one) that they reach and that are no frozen values. So an attribute that moves into a part still counts
MUTABLE = {
    "replicas.request.Req": 49,  # 25 of its own
    # 12 of its own; 15 are drafts, 10 the shares of tenants, one the room for adapters
    "replicas.scheduler.scheduler.Scheduler": 70,
    "replicas.engine.engine.Engine": 68,  # 16 of its own; one is how many tokens a step makes of a request
}
PARAMETERS = 8  # of a function that is written out; a frozen value is built by its fields' names
FUNCTION = 60  # lines
SHORT_FILE = 40  # lines: a file under this needs two importers
FILES = 20  # of Python in one folder
DOCSTRING = 5  # words

KERNEL = "a kernel: its arguments are registers, and numba, LLVM and Triton take no record"
LONG: dict[str, str] = {
    "deployments.router.__init__": "the order in which a router starts, read from top to bottom",
}
MANY: dict[str, str] = {
    "replicas.cache.tree_view.cache_tree": "the limits are the query parameters of GET /cache_tree, one by one",
    "replicas.kernels.experts.routing.route": "the fields of MoEConfig, which kernels do not know",
    "routing.pair.choose_pair": "called for every request: what its callers hold is passed on, and no value made of it",
} | dict.fromkeys(
    (
        *(f"replicas.attention.cpu_decode.{name}" for name in (
            "attend_chunk", "fetch", "attend", "score_pairs", "add_pairs")),
        *(f"replicas.attention.cpu_extend.{name}" for name in ("load_block", "load_pairs")),
        *(f"replicas.attention.cpu_pages.{name}" for name in ("read_block", "tokens_at")),
        "replicas.attention.cpu_pairs.multiply_pairs",
        *(f"replicas.attention.triton_kernels.{name}" for name in (
            "_attend", "decode_parts", "merge_parts", "extend", "turn_and_store", "store", "list_pages")),
        "replicas.kernels.adapters.low_rank.multiply_narrow",
        *(f"replicas.kernels.adapters.triton_low_rank.{name}" for name in ("shrink", "expand")),
        *(f"replicas.kernels.experts.triton_grouped.{name}" for name in (
            "choose_experts", "cut_tiles", "grouped_product")),
        *(f"replicas.kernels.bf16_tiles.{name}" for name in ("_emit_dot_tile", "emit")),
        "replicas.kernels.scaled_dots._emit_scaled",
        "replicas.kernels.int8.multiply",
        "replicas.kernels.int8_tiles.tile",
        "replicas.kernels.linear.multiply",
        "replicas.kernels.panel_tiles._emit_tile",
        "replicas.kernels.register_tiles.tile",
        *(f"replicas.kernels.tiles.{name}" for name in (
            "outer", "_outer_wide", "_outer_narrow", "outer_fetch", "dot", "_dot_wide")),
        "replicas.kernels.triton_rows.draw",
        "replicas.kernels.triton_rows._cut",
    ),
    KERNEL,
)  # fmt: skip

SCHEMAS = {"BaseModel", "Struct", "TypedDict", "NamedTuple"}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Parse all units: in a test, as processes that run others import this file too, and it takes seconds."""
    return {unit: ast.parse(path.read_text()) for unit, path in UNITS.items()}


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    return {
        f"{unit}.{node.name}": node
        for unit, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{unit}.{node.name}", node)
        for unit, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def attributes(cls: ast.ClassDef) -> set[str]:
    """The names that an instance holds: its annotated fields, and what its methods assign to self."""
    found = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.dump(node.annotation)
    }
    for node in ast.walk(cls):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in (each for one in targets for each in ast.walk(one)):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count its parameters, without self."""
    given = [*function.args.posonlyargs, *function.args.args]
    return len(given) - (bool(given) and given[0].arg in ("self", "cls")) + len(function.args.kwonlyargs)


def is_value(cls: ast.ClassDef) -> bool:
    """Whether it is a frozen value or a schema, whose fields are what it is about, not what it does."""
    if any("frozen=True" in ast.unparse(each) for each in [*cls.decorator_list, *cls.keywords]):
        return True
    bases = {ast.unparse(base).rsplit(".", 1)[-1] for base in cls.bases}
    ours = [each for each in classes().values() if each.name in bases and each is not cls]
    return bool(bases & SCHEMAS) or any(is_value(each) for each in ours)


def test_fields_and_what_methods_assign_are_counted() -> None:
    (cls,) = ast.parse("class A:\n a: int\n def __init__(self, b, *, c):\n  self.b, self.c = b, c\n").body
    assert isinstance(cls, ast.ClassDef)
    assert isinstance(cls.body[1], ast.FunctionDef)
    assert (attributes(cls), parameters(cls.body[1]), is_value(cls)) == ({"a", "b", "c"}, 2, False)


def test_a_class_holds_few_things() -> None:
    over = {
        name: sorted(attributes(cls))
        for name, cls in classes().items()
        if not is_value(cls) and len(attributes(cls)) > ATTRIBUTES.get(name, ATTRIBUTES_OTHERWISE)
    }
    assert not over


def test_a_class_does_few_things() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    count = {name: sum(isinstance(node, kinds) for node in cls.body) for name, cls in classes().items()}
    assert not {name: num for name, num in count.items() if num > METHODS.get(name, METHODS_OTHERWISE)}


def parts(name: str) -> set[str]:
    """List the classes of the same room that an instance of ``name`` can reach: by the types of its fields, the calls
    that make its attributes, and the parameters of its constructor; and what derives from these. Frozen values are left
    out."""
    of_room = {
        other.rsplit(".", 1)[-1]: other
        for other, cls in classes().items()
        if house.room_of(UNITS[other.rsplit(".", 1)[0]]) == house.room_of(UNITS[name.rsplit(".", 1)[0]])
        and not is_value(cls)
    }
    found: set[str] = set()

    def visit(each: str) -> None:
        found.add(each)
        cls = classes()[each]
        fields = [node.annotation for node in ast.walk(cls) if isinstance(node, ast.AnnAssign)]
        made = [
            node.value
            for node in ast.walk(cls)
            if isinstance(node, ast.Assign)
            and any(isinstance(a, ast.Attribute) for one in node.targets for a in ast.walk(one))
        ]
        given = [
            argument.annotation
            for node in cls.body
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
            for argument in (*node.args.args, *node.args.kwonlyargs)
            if argument.annotation is not None
        ]
        words = re.findall(r"\w+", " ".join(ast.unparse(node) for node in (*fields, *made, *given)))
        derived = {of for of in of_room.values() if cls.name in {ast.unparse(base) for base in classes()[of].bases}}
        for part in ({of_room[word] for word in words if word in of_room} | derived) - found:
            visit(part)

    visit(name)
    return found


def test_parts_of_one_room_are_reached() -> None:
    found = parts("replicas.scheduler.scheduler.Scheduler")
    assert {"replicas.scheduler.precedence.WaitingQueue", "replicas.scheduler.speculation.Speculation"} <= found


def test_what_can_change_is_counted_with_the_parts() -> None:
    count = {name: sum(len(attributes(classes()[part])) for part in parts(name)) for name in MUTABLE}
    assert not {name: sorted(parts(name)) for name, most in MUTABLE.items() if count[name] > most}, count


def test_a_function_takes_few_things() -> None:
    assert {name for name, each in functions() if parameters(each) > PARAMETERS} == MANY.keys()


def test_a_function_is_short() -> None:
    assert {name for name, each in functions() if (each.end_lineno or 0) - each.lineno >= FUNCTION} == LONG.keys()


def importers() -> dict[str, set[str]]:
    found = collections.defaultdict(set)
    for unit, path in UNITS.items():
        for name in imports(path.read_text()):
            found[name].add(unit)
    return found


def test_a_short_file_has_two_importers() -> None:
    by = importers()
    short = {
        unit: len(by[unit])
        for unit, path in UNITS.items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text().splitlines()) < SHORT_FILE
        and len(by[unit]) < 2
    }
    assert not short, "merge each into what imports it"


def test_no_folder_is_full() -> None:
    number = collections.Counter(
        str(path.parent.relative_to(ROOT)) for path in UNITS.values() if path.name != "__init__.py"
    )
    full = {folder: count for folder, count in number.items() if count > FILES}
    assert not full


def test_a_class_says_what_it_is() -> None:
    """A class without a docstring says nothing."""
    docs = {name: ast.get_docstring(cls) or "" for name, cls in classes().items() if not cls.name.startswith("_")}
    assert not {name: doc for name, doc in docs.items() if len(doc.split()) < DOCSTRING}


def test_no_two_classes_have_one_name() -> None:
    homes = collections.defaultdict(list)
    for name, node in classes().items():
        if not node.name.startswith("_"):
            homes[node.name].append(name)
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert not twice


@pytest.fixture(scope="module")
def ways() -> Mapping[str, list[str]]:
    return house.ways()


@pytest.mark.model
@pytest.mark.parametrize(("name", "most"), [("chat", 70), ("kv_transfer", 21)])
def test_a_request_runs_through_few_files(ways: Mapping[str, list[str]], name: str, most: int) -> None:
    """``kv_transfer``: what it adds to a chat's. Functions called are counted, by a profiler (tests/way.py)."""
    assert len(ways[name]) <= most, f"{len(ways[name])} files lie on the way: {sorted(ways[name])}"


@pytest.mark.model
def test_the_walks_through_the_house_are_those_of_the_requests(ways: Mapping[str, list[str]]) -> None:
    assert way.wrong(ways) == []


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    assert (house.PICTURES / "rooms.svg").read_text() == house.rooms_svg(), "draw it anew: python -m tools.house"


@pytest.mark.parametrize("name", diagrams.DRAWN)
def test_the_pictures_of_the_engine_show_what_it_does(name: str) -> None:
    drawn = (house.PICTURES / f"{name}.svg").read_text()
    assert drawn == diagrams.DRAWN[name](), "draw it anew: python -m tools.diagrams"


@pytest.mark.model
def test_the_picture_of_the_way_shows_the_files_that_run(ways: Mapping[str, list[str]]) -> None:
    """Their order may differ: threads take turns as they like."""
    shown = set(
        re.findall(
            r"[a-z0-9_]+", " ".join(re.findall(r'class="file">([^<]*)<', (house.PICTURES / "way.svg").read_text()))
        )
    )
    assert shown == {pathlib.PurePath(file).stem for file in ways["chat"]}, "draw it anew: python -m tools.house"
