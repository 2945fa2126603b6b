"""Imports go down only: FLOORS says which room may import which, this test is its enforcement.

Lazy and TYPE_CHECKING imports count too: a cycle hidden in a function is still a cycle.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from deployments.http.http_errors import STATUS
from replicas.errors import Fault
from tools.house import imports

ROOT = pathlib.Path(__file__).parents[2]

# the longest matching name wins; the value is what of ours that unit may import besides itself
FLOORS: dict[str, set[str]] = {
    "dashboards": set(),
    "kvtransfer": set(),
    "routing": {"kvtransfer.pages"},
    "replicas": set(),  # a module that lands here has no floor yet: give it one
    "replicas.errors": set(),
    "replicas.types": {"replicas.errors", "kvtransfer.types"},
    "replicas.kernels.weight_formats": set(),
    "replicas.config": {"replicas.errors", "replicas.kernels.weight_formats", "kvtransfer.layout"},
    "replicas.hf_config": {"replicas.config", "replicas.errors"},
    "replicas.request": {"replicas.types", "replicas.errors", "kvtransfer.types"},
    "replicas.layers.tp_group": {"replicas.errors"},
    "replicas.text": {"replicas.types", "replicas.errors", "replicas.config", "replicas.hf_config"},
    "replicas.grammar": {"replicas.text", "replicas.types", "replicas.errors"},
    "replicas.memory": {
        "replicas.kernels.weight_formats", "replicas.types", "replicas.errors", "replicas.config", "kvtransfer.layout",
    },
    "replicas.cache": {
        "replicas.memory", "replicas.request", "replicas.types", "replicas.errors", "replicas.config",
        "kvtransfer.layout", "kvtransfer.pages", "kvtransfer.stores",
    },
    "replicas.cache.page_home": {
        "replicas.cache", "replicas.request", "replicas.memory", "replicas.types", "kvtransfer.pages",
        "kvtransfer.layout", "kvtransfer.migration",
    },
    # a leaf: runner and attention know plans, not the scheduler
    "replicas.scheduler.plan": {"replicas.types"},
    "replicas.scheduler": {
        "replicas.cache", "replicas.request", "replicas.types", "replicas.errors", "replicas.config",
    },
    "replicas.kernels": set(),
    "replicas.layers": {"replicas.kernels", "replicas.errors", "replicas.config"},
    "replicas.attention": {
        "replicas.scheduler.plan", "replicas.kernels", "replicas.memory", "replicas.types", "replicas.errors",
        "replicas.config",
    },
    "replicas.resolve": {
        "replicas.attention.registry", "replicas.kernels.weight_formats", "replicas.config", "replicas.errors",
        "replicas.memory.sizing", "kvtransfer.layout",
    },
    "replicas.checkpoints": {"replicas.kernels.weight_formats", "replicas.config", "replicas.errors"},
    "replicas.models": {
        "replicas.layers", "replicas.attention", "replicas.errors", "replicas.config", "replicas.hf_config",
        "replicas.kernels.elementwise", "replicas.kernels.gated_delta", "replicas.memory.state_pool",
    },
    "replicas.loading": {
        "replicas.models", "replicas.layers", "replicas.kernels", "replicas.memory", "replicas.checkpoints",
        "replicas.config", "replicas.hf_config", "replicas.errors",
    },
    "replicas.runner": {
        "replicas.loading", "replicas.models", "replicas.attention", "replicas.layers", "replicas.kernels",
        "replicas.memory", "replicas.scheduler.plan", "replicas.config", "replicas.errors", "replicas.types",
        "kvtransfer.layout", "kvtransfer.replay.payload",
    },
    "replicas.ranks": {
        "replicas.runner", "replicas.layers", "replicas.memory", "replicas.scheduler.plan", "replicas.config",
        "replicas.errors", "kvtransfer.layout", "kvtransfer.types", "kvtransfer.errors", "kvtransfer.ports",
        "kvtransfer.peers",
    },
    "replicas.observer": {
        "replicas.scheduler", "replicas.cache", "replicas.request", "kvtransfer.replay",
    },
    "replicas.disagg": {
        "replicas.observer", "replicas.scheduler", "replicas.cache",
        "replicas.request", "replicas.types", "replicas.errors", "kvtransfer.replay", "kvtransfer.types",
        "kvtransfer.rooms.transfer_service",
    },
    "replicas.engine": {
        "replicas.scheduler", "replicas.cache", "replicas.memory", "replicas.request",
        "replicas.text", "replicas.grammar", "replicas.disagg", "replicas.config",
        "replicas.observer", "replicas.types", "replicas.errors", "kvtransfer.replay", "kvtransfer.types",
        "kvtransfer.rooms.transfer_service",
    },
    "replicas.engine.ranks": {
        "replicas.ranks", "replicas.runner", "replicas.kernels", "replicas.layers.tp_group", "replicas.layers.adapters",
        "replicas.checkpoints.adapters", "replicas.engine.adapters", "replicas.scheduler.plan",
        "replicas.memory.host", "replicas.config", "replicas.errors", "replicas.types", "kvtransfer.ports",
    },
    "replicas.launch": {
        "replicas.engine", "replicas.disagg", "replicas.loading", "replicas.runner", "replicas.ranks", "replicas.cache",
        "replicas.memory.host",
        "replicas.text", "replicas.config", "replicas.resolve", "replicas.types", "replicas.errors", "kvtransfer",
    },
    "replicas.calibrate": {
        "replicas.loading", "replicas.models", "replicas.attention", "replicas.layers.tp_group", "replicas.memory",
        "replicas.text", "replicas.config", "replicas.errors",
    },
    "replicas.replay": {
        "replicas.launch", "replicas.engine", "replicas.config", "replicas.request", "replicas.types",
        "replicas.errors", "kvtransfer.replay", "kvtransfer.errors",
    },
    "deployments": set(),  # as ``replicas``
    "deployments.autoscaling": {"replicas.types"},
    "deployments.places": {"replicas.checkpoints", "replicas.errors"},
}
# the rooms of deployments/, from the lowest: each may import what is below it, and the houses under deployments/
ROOMS = (
    ("output",), ("tenancy",), ("settings",), ("channel",), ("record",), ("logs",), ("dispatch",), ("fleet",),
    ("batches",), ("http",), ("watch",), ("router", "replica"), ("app",), ("command", "__main__"),
)  # fmt: skip
BELOW = {"dashboards", "kvtransfer", "routing", "replicas"}
BELOW |= {f"deployments.{file}" for file in ("autoscaling", "places")}
for level in ROOMS:
    FLOORS |= {f"deployments.{room}": set(BELOW) for room in level}
    BELOW |= {f"deployments.{room}" for room in level}
FLOORS["deployments.__main__"] = {*BELOW} - {"deployments.__main__"}
# third-party package -> the only units of ours that may import it
ONLY: dict[str, set[str]] = {
    "ray": {"deployments"},
    "fastapi": {"deployments"},
    "starlette": {"deployments"},
    "uvicorn": {"deployments"},
    "pydantic": {"deployments"},
    "aiohttp": {"deployments"},
    "httpx": {"deployments"},
    "prometheus_client": {"deployments"},
    "yaml": {"deployments", "dashboards"},
    "jsonschema": {"deployments.output"},
    "llguidance": {"replicas.grammar"},
    "promql_parser": set(),
    "msgspec": {"kvtransfer", "deployments.channel"},
    "nixl": {"kvtransfer.ports.agent"},
    "boto3": {"kvtransfer.stores.object"},
    "botocore": {"kvtransfer.stores.object"},
    "grafana_foundation_sdk": set(),
    "opentelemetry": {"deployments"},
    "rich": {"deployments", "replicas.loading.weights"},
    "flashinfer": {"replicas.attention", "replicas.runner.sampler"},
    "triton": {"replicas.attention", "replicas.kernels"},
    "numba": {"replicas.kernels", "replicas.attention", "replicas.layers"},
    "llvmlite": {"replicas.kernels"},
    "transformers": {
        "replicas.text.tokenizer", "replicas.loading.model_files", "replicas.models.transformers",
        "replicas.models.outline", "replicas.models.own_parts", "replicas.models.sharding",
        "replicas.models.states", "replicas.checkpoints.gguf_folder",
    },
    "safetensors": {
        "replicas.checkpoints.safetensors_files", "replicas.checkpoints.adapters", "replicas.memory.kv_scales",
    },
    "gguf": {"replicas.checkpoints.gguf_file"},
    "torch": {
        "kvtransfer.ports.agent", "tests.local_agents", "kvtransfer.ports.memory", "replicas.memory.pool",
        "replicas.memory.scaled_pool", "replicas.memory.latent_pool",
        "replicas.memory.sparse_pool", "replicas.memory.state_pool", "replicas.calibrate",
        "replicas.memory.host",
        "replicas.kernels", "replicas.layers", "replicas.attention", "replicas.models",
        "replicas.checkpoints", "replicas.loading", "replicas.runner", "replicas.ranks", "replicas.launch",
    },
}
OURS = {floor.split(".")[0] for floor in FLOORS}
ABOVE = {"benchmarks", "tests", "tools"}  # may import anything; nothing of ours imports them
# importing any module of these must not load torch, not even through another module
HOST = (
    "replicas.types", "replicas.errors", "replicas.config", "replicas.hf_config", "replicas.request",
    "replicas.resolve", "replicas.attention.registry",
    "replicas.kernels.weight_formats", "replicas.engine.open_requests",
    "replicas.checkpoints.adapters",
    "replicas.engine.stepping", "replicas.text.detokenizer", "replicas.memory.sizing", "replicas.memory.allocator",
    "replicas.cache", "replicas.scheduler", "replicas.disagg", "routing", "dashboards",
)  # fmt: skip

# the modules that import others of ours in functions, and why
LATE: dict[str, str] = {
    "deployments.__main__": "a command loads what it runs: `manta settings` needs no Ray",
    "deployments.command.check": "only settings that ask for GPUs need torch, which counts them",
    "deployments.http.service": "only a config.json that leaves its context to its family needs Transformers and torch",
    "deployments.replica.model_replica": "settings are checked and applications built without torch",
    "deployments.replica.served_engine": "settings are checked and applications built without numba",
    "deployments.watch.metrics.replica_metrics": "the same; only a replica on a GPU has its figures",
    "deployments.tenancy.keys": "only router.keys_file needs pydantic: the command line reads keys too",
    "deployments.places": "only the path of a GGUF file needs Transformers and gguf",
    "replicas.attention.registry": "a backend's libraries may be missing, and settings are checked without torch",
    "replicas.checkpoints.checkpoint": "only a GGUF file needs gguf",
    "replicas.checkpoints.gguf_file": "the file's header is read without torch",
    "replicas.kernels.gpu": "Triton may be missing",
    "replicas.kernels.adapters.on_gpu": "Triton may be missing",
    "replicas.kernels.experts.on_gpu": "Triton may be missing",
    "replicas.layers.linear": "Triton may be missing",
    "replicas.layers.moe": "Triton may be missing",
    "replicas.models.registry": "a family of our own needs no Transformers",
    "replicas.loading.model_files": "only a model that Transformers runs needs its outline, and one in bfloat16 numba",
    "replicas.runner.model_runner": "only attention: double_sparse has a pool with labels",
    "replicas.memory.scaled_pool": "only latent attention has a latent pool",
    "replicas.replay.__main__": "`show` needs none of the engine's seconds of imports",
}


def under(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def floor_of(unit: str) -> str:
    """The longest floor that ``unit`` stands on; 'replicas' and 'deployments' themselves hold only docstrings."""
    return max((floor for floor in FLOORS if under(unit, {floor})), key=len)


def faults(unit: str, names: list[str]) -> list[str]:
    """What ``unit`` imports and may not, in words."""
    floor = floor_of(unit)
    found = []
    for name in names:
        root = name.split(".")[0]
        if root in ABOVE:
            found.append(f"{unit} may not import {name}: benchmarks, tests and tools stand above the house")
        own = {floor} if floor not in OURS - {"kvtransfer", "routing", "dashboards"} else set()
        if root in OURS and not under(name, FLOORS[floor] | own):
            found.append(f"{unit} (floor {floor}) may not import {name}; it may: {sorted(FLOORS[floor])}")
        if root in ONLY and not under(unit, ONLY[root]):
            found.append(f"{unit} may not import {name}; only {sorted(ONLY[root])} may")
    return found


def unit_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


UNITS = {unit_of(path): path for root in sorted(OURS) for path in sorted((ROOT / root).rglob("*.py"))}


@pytest.mark.parametrize("unit", UNITS)
def test_imports_go_down_only(unit: str) -> None:
    assert faults(unit, imports(UNITS[unit].read_text())) == []


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("replicas.cache.kv", "from replicas.scheduler.plan import ExtendPlan"),
        ("replicas.cache.radix", "import torch"),
        ("replicas.engine.engine", "def f():\n    import ray"),
        ("replicas.memory.allocator", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("deployments.router", "from benchmarks.client import Client"),
        ("replicas.newcomer", "import replicas.types"),
        ("deployments.fleet.fleet", "from deployments.watch.observatory.router_view import RouterView"),
    ],
)
def test_an_import_that_goes_up_is_found(unit: str, source: str) -> None:
    assert len(faults(unit, imports(source))) == 1


def test_the_runner_may_know_plans() -> None:
    assert faults("replicas.runner.batch", imports("from replicas.scheduler.plan import ExtendPlan")) == []


def test_floors_have_no_cycle() -> None:
    def owner(name: str) -> str:
        return max((f for f in FLOORS if under(name, {f})), key=len, default=name)

    graph = {floor: {owner(d) for d in deps} - {floor} for floor, deps in FLOORS.items()}
    done: set[str] = set()

    def visit(floor: str, path: tuple[str, ...]) -> None:
        assert floor not in path, f"cycle: {' -> '.join([*path, floor])}"
        if floor not in done:
            for below in graph.get(floor, ()):
                visit(below, (*path, floor))
            done.add(floor)

    for floor in FLOORS:
        visit(floor, ())


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules of each circle of imports, found by Tarjan's strongly connected components."""
    found: list[list[str]] = []
    order, low, stack = dict[str, int](), dict[str, int](), list[str]()

    def visit(unit: str) -> None:
        order[unit] = low[unit] = len(order)
        stack.append(unit)
        for below in graph[unit]:
            if below not in order:
                visit(below)
            if below in stack:
                low[unit] = min(low[unit], low[below])
        if low[unit] == order[unit]:
            at = stack.index(unit)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for unit in graph:
        if unit not in order:
            visit(unit)
    return found


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == [["a", "b", "c"]]


def test_no_modules_import_each_other() -> None:
    """Imports in functions and under TYPE_CHECKING count: they hide a circle, and do not cut it."""
    graph = {unit: set(imports(path.read_text())) & UNITS.keys() - {unit} for unit, path in UNITS.items()}
    assert circles(graph) == []


def late_imports(source: str) -> set[str]:
    """Modules of ours that ``source`` imports in functions."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    found = {name for each in functions for name in imports(ast.unparse(each))}
    return {name for name in found if name.split(".")[0] in OURS}


def test_imports_in_functions_have_a_reason() -> None:
    late = {unit for unit, path in UNITS.items() if late_imports(path.read_text())}
    assert late == LATE.keys()


def test_host_code_loads_neither_torch_nor_ray() -> None:
    """Scheduler, radix cache and allocator need no device; their tests must not load one."""
    units = [unit for unit in UNITS if under(unit, set(HOST))]
    program = (
        "import importlib, sys\n"
        f"for unit in {units!r}:\n"
        "    importlib.import_module(unit)\n"
        "    loaded = {'torch', 'ray', 'transformers'} & sys.modules.keys()\n"
        "    if loaded: sys.exit(f'importing {unit} loads {sorted(loaded)}')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


EARLY = {  # what starts before the replicas, and libraries that it has no use for
    # it shows what routers tell; the process that builds it starts beside those of the replicas
    "import deployments.watch.observatory.app": {"torch", "numba", "transformers", "tokenizers"},
    # the replicas wait for these two: a plain checkpoint is judged from config.json and the names of its files
    "from deployments.command import serve; serve.read('serve_config.yaml')": {"torch", "numba"},
    "from deployments import app\n"
    "app.build({'model': {'path': 'models/SmolLM2-135M-Instruct'}, 'replicas': {'count': 1}})": {"torch", "numba"},
}  # fmt: skip


@pytest.mark.model
def test_what_starts_before_the_replicas_loads_nothing_that_computes() -> None:
    """One after the other in one process, each with what the ones before it have loaded."""
    program = "import sys\n" + "".join(
        f"{what}\n"
        f"loaded = {needless!r} & sys.modules.keys()\n"
        f"if loaded: sys.exit(f'it loads {{sorted(loaded)}}: ' + {what!r})\n"
        for what, needless in EARLY.items()
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", sorted(path for path in UNITS.values() if path.name == "__init__.py"), ids=unit_of)
def test_an_init_holds_a_docstring_only(path: pathlib.Path) -> None:
    """All but one: libraries read the environment when they are imported, and MANTA_CPU has to be looked at before."""
    body = ast.parse(path.read_text()).body
    if unit_of(path) == "replicas.kernels":
        does = ["import os", "from replicas.kernels import instructions", "instructions.hold(os.environ)"]
        assert [ast.unparse(each) for each in body[1:]] == does
        return
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_below_http_a_failure_is_of_a_kind_and_has_no_status() -> None:
    """One table says with which status HTTP answers each kind (deployments/http/http_errors.py)."""
    named = re.compile(r"http_?status|status_?code|HTTPStatus", re.IGNORECASE)
    houses = {"replicas", "kvtransfer", "routing", "deployments.dispatch", "deployments.record", "deployments.tenancy"}
    trees = {unit: ast.parse(path.read_text()) for unit, path in UNITS.items() if under(unit, houses)}
    assert [unit for unit, tree in trees.items() if named.search(ast.unparse(tree))] == []
    ends = [node for tree in trees.values() for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finish"]  # fmt: skip
    assert len(ends) > 9
    numbers = {node.value for end in (*ends, trees["replicas.errors"]) for node in ast.walk(end)
               if isinstance(node, ast.Constant) and isinstance(node.value, int)}  # fmt: skip
    assert not numbers & set(STATUS.values())
    assert STATUS.keys() == set(Fault)
