"""What stands in deploy/ fits the schemas of those who read it, and the code: ports, probes, variables and settings."""

import json
import lzma
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from dashboards import __main__ as dashboards
from deployments.command.check import read
from deployments.command.haproxy import BINARY, FLAGS, ROUTES, WRAPPER
from deployments.http.access import OPEN
from deployments.places import ROOT, VERSION
from deployments.settings.schema import parse
from deployments.settings.settings_file import PORT
from tests.cluster.cluster import AGAIN, Cluster

DEPLOY = ROOT / "deploy"
SCHEMAS = json.loads(lzma.decompress((ROOT / "tests/data/deploy_schemas.json.xz").read_bytes()))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
VARIANTS = ("cpu", "gpu", "disaggregated", "ha")
INSTALLED = "/opt/manta/lib/python3.11/site-packages/"

Objects = dict[str, Any]  # "kind name" -> object


def rendered(folder: Path) -> Objects:
    """Make what `kubectl kustomize` makes of a folder, as far as ours use it: resources, and JSON patches by kind."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found: Objects = {}
    for path in (folder / name for name in settings["resources"]):
        found |= rendered(path) if path.is_dir() else by_name(path.read_text())
    for patch in settings.get("patches", ()):
        for target in (each for each in found.values() if each["kind"] == patch["target"]["kind"]):
            for change in yaml.safe_load(patch["patch"]):
                apply(target, **change)
    return found


def by_name(text: str) -> Objects:
    """Read objects; anchors stand for copies."""
    objects = (json.loads(json.dumps(each)) for each in yaml.safe_load_all(text))
    return {f"{each['kind']} {each['metadata']['name']}": each for each in objects}


def apply(target: Any, *, op: str, path: str, value: Any) -> None:
    *way, name = (int(part) if part.isdecimal() else part for part in path.strip("/").split("/"))
    for part in way:
        target = target[part]
    if isinstance(target, list):
        assert (op, name) == ("add", len(target)), f"{op} {path}"
        target.append(value)
        return
    assert (name in target) == (op == "replace"), f"{op} {path}"
    target[name] = value


def faults(kind: str, each: Any) -> list[str]:
    schema = jsonschema.Draft202012Validator({**SCHEMAS["kinds"][kind], "$defs": SCHEMAS["$defs"]})
    return [f"{error.json_path}: {error.message[:200]}" for error in schema.iter_errors(each)]


def service(variant: str) -> dict[str, Any]:
    found: dict[str, Any] = rendered(DEPLOY / "kuberay" / variant)["RayService manta"]["spec"]
    return found


def pods(variant: str) -> dict[str, dict[str, Any]]:
    """The pods of the head and of the workers, with their own spec."""
    cluster = service(variant)["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_of_a_variant_fits_its_schema(variant: str) -> None:
    found = rendered(DEPLOY / "kuberay" / variant)
    assert {"RayService manta", "NetworkPolicy manta", "PodDisruptionBudget manta", "PodMonitor manta"} <= found.keys()
    assert {name: faults(each["kind"], each) for name, each in found.items() if faults(each["kind"], each)} == {}
    cluster = found["RayService manta"]["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["template"]["spec"]["containers"][0] |= {"imagePullPolice": "Always", "env": [{"name": 1}]}
    assert len(faults("RayService", found["RayService manta"])) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubectl_makes_the_same_of_a_variant(variant: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH, and Debian's is too old to read patches")
    command = ["kubectl", "kustomize", str(DEPLOY / "kuberay" / variant)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert by_name(made) == rendered(DEPLOY / "kuberay" / variant)


@pytest.mark.model
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_settings_of_a_variant_can_be_served_by_its_pods(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.embedded import MODEL

    spec, worker = service(variant), pods(variant)["worker"]
    [mount] = [each["mountPath"] for each in worker["containers"][0]["volumeMounts"] if each["name"] == "models"]
    file = tmp_path / "serve_config.yaml"
    file.write_text(spec["serveConfigV2"].replace(f"{mount}/SmolLM2-135M-Instruct", str(ROOT / MODEL)))
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    schema, configs = read(str(file))
    [config] = configs.values()
    resources, group = worker["containers"][0]["resources"], spec["rayClusterConfig"]["workerGroupSpecs"][0]
    groups = [config.replicas] if config.mode == "unified" else [config.prefill, config.decode]
    assert sum(int(each.count or 0) for each in groups) == group["replicas"] == group["maxReplicas"]  # one on each node
    assert config.router.cpus > 0  # one that reserves none may be put on the head
    assert config.replicas.cpus + config.router.cpus <= int(resources["requests"]["cpu"])
    assert config.replicas.gpus == int(resources["limits"].get("nvidia.com/gpu", 0))
    assert (schema.http_options.host, schema.http_options.port, schema.proxy_location) == ("0.0.0.0", PORT, "EveryNode")
    [routes] = [each["value"] for each in worker["containers"][0]["env"] if each["name"] == ROUTES]
    assert routes.split() == [each.route_prefix for each in schema.applications]
    budget = rendered(DEPLOY / "kuberay" / variant)["PodDisruptionBudget manta"]["spec"]
    assert 0 < budget["minAvailable"] < group["replicas"]


def test_nodes_have_the_versions_ports_probes_and_times_of_the_code() -> None:
    spec, found = service("cpu"), pods("cpu")
    ray = next(each for each in project()["dependencies"] if each.startswith("ray["))
    assert ray == f"ray[serve]=={spec['rayClusterConfig']['rayVersion']}"
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in found.values():
        [container] = pod["containers"]
        assert container["image"] == COMPOSE["services"]["manta"]["image"] == f"manta-serve:{VERSION}"
        assert {each["name"]: each["containerPort"] for each in container["ports"]}["serve"] == PORT
    probe = found["worker"]["containers"][0]["readinessProbe"]["httpGet"]
    assert (probe["path"] in OPEN, probe["port"]) == (True, "serve")
    objects = rendered(DEPLOY / "kuberay/cpu")
    [end_point] = objects["PodMonitor manta"]["spec"]["podMetricsEndpoints"]
    assert (end_point["port"], end_point["path"]) == ("serve", "/manta/metrics")
    assert [{"port": PORT}] in [each.get("ports") for each in objects["NetworkPolicy manta"]["spec"]["ingress"]]
    env = {each["name"]: each["value"] for each in found["worker"]["containers"][0]["env"]}
    drain_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert parse({"model": {"path": "m"}}).replicas.drain_timeout_s < drain_s
    assert drain_s < found["worker"]["terminationGracePeriodSeconds"] == spec["rayClusterDeletionDelaySeconds"]
    worker = (DEPLOY / "systemd/manta-ray-worker.service").read_text()
    assert f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S={drain_s:g}\n" in worker
    assert f"TimeoutStopSec={found['worker']['terminationGracePeriodSeconds']}\n" in worker


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_every_node_gets_the_variables_that_manta_serve_sets() -> None:
    given = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "manta.env").read_text(), flags=re.MULTILINE))
    assert {name: given.get(name) for name in FLAGS} == FLAGS
    units = (DEPLOY / "systemd/manta-ray-.service.d/ray.conf").read_text()
    script = f"{BINARY}={INSTALLED}{WRAPPER.relative_to(ROOT)}"
    assert f"Environment={script}\n" in units
    assert script in DOCKERFILE
    assert f'Environment="{ROUTES}=/ /manta"\n' in units
    assert "Restart=always\n" in units  # a node that was declared dead ends its Ray when it is back
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    code = "".join(path.read_text() for path in (ROOT / "deployments").rglob("*") if path.suffix in (".py", ".sh"))
    named = {name for path in files for name in re.findall(r"\bMANTA_\w+", path.read_text())}
    assert {name for name in named if name not in code} == {"MANTA_HEAD"}  # of the workers' unit alone


def test_compose_fits_its_schema_and_starts_what_the_image_has() -> None:
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMAS["compose"]).iter_errors(COMPOSE)] == []
    assert list(jsonschema.Draft202012Validator(SCHEMAS["compose"]).iter_errors({"services": {"a": {"port": []}}}))
    services = COMPOSE["services"]
    assert set(services) == {"manta", "watch", "prometheus", "grafana", "collector"}
    assert services["manta"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    port = services["manta"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"].rpartition(":")[2]
    receivers = yaml.safe_load(COMPOSE["configs"]["collector"]["content"])["receivers"]
    assert receivers["otlp"]["protocols"]["http"]["endpoint"].endswith(f":{port}")
    assert "otel" in re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, flags=re.MULTILINE)[0].split(",")


def test_compose_finds_what_the_export_writes(tmp_path: Path) -> None:
    services = COMPOSE["services"]
    _, *words = (re.sub(r"\$\{LIVE_VIEW:-(.*)\}", r"\1", word) for word in services["watch"]["command"])
    assert dashboards.main([str(tmp_path) if word == "/watch" else word for word in words]) == 0
    [published] = services["manta"]["ports"]
    led = [path.read_text() for path in (*tmp_path.glob("grafana/boards/*.json"), tmp_path / "rules.yml")]
    assert [f"http://{published.rpartition(':')[0]}/manta" in each for each in led] == [True] * 4
    assert not any("http://manta:" in each for each in led), "a name that a browser outside does not find"
    [config] = [word for word in services["prometheus"]["command"] if word.startswith("--config.file=")]
    settings = yaml.safe_load((tmp_path / config.removeprefix("--config.file=/watch/")).read_text())
    [job] = settings["scrape_configs"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert job["http_sd_configs"][0]["url"] == f"http://manta:{PORT}/manta/sd"
    provisioning = services["grafana"]["environment"]["GF_PATHS_PROVISIONING"].replace("/watch", str(tmp_path))
    assert len(list(Path(provisioning).glob("*/manta.yml"))) == 2
    made = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())  # of the same folder, for Kubernetes
    [rules] = by_name((tmp_path / made["resources"][0]).read_text()).values()
    assert faults("PrometheusRule", rules) == []
    boards = [name for each in made["configMapGenerator"] for name in each["files"]]
    assert [(tmp_path / name).is_file() for name in boards] == [True] * 3


def test_systemd_reads_the_units(tmp_path: Path) -> None:
    """With another program in the place of ours, which is not installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on PATH: `apt-get install systemd`")
    shutil.copytree(DEPLOY / "systemd", tmp_path, dirs_exist_ok=True)
    units = sorted(tmp_path.glob("*.service"))
    for unit in units:
        program = re.findall(r"^ExecStart=/opt/manta/bin/(\w+) ", unit.read_text(), flags=re.MULTILINE)
        assert program in (["manta"], ["ray"])
        unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))

    def said() -> str:
        command = ["systemd-analyze", "verify", *map(str, units)]
        env = {"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False).stderr

    assert said() == ""
    shared = tmp_path / "manta-.service.d/manta.conf"
    shared.write_text(shared.read_text().replace("KillMode=", "KillMod="))
    assert said().count("Unknown key 'KillMod'") == len(units)


def test_the_image_is_made_of_checked_files_and_runs_as_a_user_of_its_own() -> None:
    lines = [line for line in re.sub(r"\\\n", "", DOCKERFILE).splitlines() if line and not line.startswith("#")]
    steps = [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]
    stages = [rest for name, rest in steps if name == "FROM"]
    assert stages == ["${BASE} AS build", "${BASE} AS runtime", "${CUDA} AS toolkit", "runtime AS gpu", "runtime"]
    last = dict(steps[steps.index(("FROM", "${BASE} AS runtime")) :])
    assert last["USER"] == "1000:1000"  # of both images that are made
    assert last["EXPOSE"] == str(PORT)
    assert any(f"http://127.0.0.1:{PORT}{path}'" in last["HEALTHCHECK"] for path in OPEN if path != "/")
    assert json.loads(last["ENTRYPOINT"])[0] in project()["scripts"]
    assert ("COPY", "constraints.txt ./") in steps
    make = (ROOT / "Makefile").read_text()
    [install] = [rest for name, rest in steps if "constraints.txt" in rest and name == "RUN"]
    words = install.replace("constraints.txt", "$(LOCK)").removeprefix("pip install ")
    assert words in re.sub(r"\s*\\\n\s*", " ", make)  # as `make install` does
    copied = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    files = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"}
    assert copied == files | {each.rstrip("*") for each in packages}


def test_a_gpu_has_a_compiler_its_cache_a_volume_and_transfers_may_lock_memory() -> None:
    """The toolkit is of the CUDA that docs/gpu.md names for PyTorch's wheel."""
    stage = DOCKERFILE.partition("FROM runtime AS gpu")[2].partition("\nFROM ")[0]
    for needed in ("bin", "nvvm", "targets/x86_64-linux/include"):
        assert f"COPY --from=toolkit /usr/local/cuda-13.0/{needed} $CUDA_HOME/{needed}\n" in stage
    for linked in ("libcudart*", "stubs/libcuda.so"):  # as flashinfer/jit/cpp_ext.py has it
        assert f"COPY --from=toolkit /usr/local/cuda-13.0/targets/x86_64-linux/lib/{linked} $CUDA_HOME/targets" in stage
    assert "ARG CUDA=nvidia/cuda:13.0." in DOCKERFILE
    assert "cuda-toolkit-13-0" in (ROOT / "docs/gpu.md").read_text()
    pod = pods("gpu")["worker"]
    [container] = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "cache"]
    [variable] = re.findall(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE)
    assert variable.startswith(f"{mount['mountPath']}/")  # FlashInfer's is there by itself
    assert [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if each["name"] == "cache"] == [
        "manta-cache"
    ]
    assert all("cache" not in str(each["volumes"]) for each in pods("cpu").values())


class Recorded(Cluster):
    """The cluster of tests/cluster, which keeps the commands in the place of running them."""

    def __init__(self, folder: Path) -> None:
        self.head, self._token, self.ran = "HEAD", "T", []  # type: list[tuple[str, ...]]
        self.environment = self._variables()
        machine = SimpleNamespace(tmp=folder)
        self.network = SimpleNamespace(machines={"head": machine})  # type: ignore[assignment]

    def run_on(self, name: str, *command: str) -> None:
        self.ran.append(command)

    @staticmethod
    def until(*_: Any, **__: Any) -> float:
        return 0.0


def of_tests_alone(word: str) -> bool:
    """Whether a word of a command is there because the machines of tests are parts of one."""
    return word.startswith(("--object-store-memory", "--resources", "--dashboard-host", "--num-cpus=1"))


def test_the_cluster_of_the_tests_is_started_as_the_document_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    shell = "\n".join(block for kind, block in blocks if not kind)
    cluster = Recorded(tmp_path)
    cluster.start()
    started = [[word for word in command if not of_tests_alone(word)] for command in cluster.ran]
    again = f"while :; do {' '.join(started[1][4:])}; sleep 2; done"
    assert started[1][:4] == ["bash", "-c", AGAIN, "again"]
    assert again in shell
    assert f"{' '.join(started[0])} --block" in shell
    cluster.deploy()
    assert cluster.ran[-1][:2] == ("serve", "deploy")
    assert "serve deploy cluster.yaml" in shell
    [ours] = [yaml.safe_load(block) for kind, block in blocks if kind == "yaml"]
    theirs = yaml.safe_load((tmp_path / "serve.yaml").read_text())
    assert ours["http_options"] == theirs["http_options"]
    assert ours["applications"][0]["import_path"] == theirs["applications"][0]["import_path"]
    assert parse(ours["applications"][0]["args"]).router.allowed_hosts == ("*",)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(ours))
    assert set(read(str(tmp_path / "cluster.yaml"))[1]) == {"manta"}
    exported = set(re.findall(r"^export (\w+)=", shell, flags=re.MULTILINE))
    told = exported | set(re.findall(r"^(\w+)=", (DEPLOY / "manta.env").read_text(), flags=re.MULTILINE))
    assert {name for name in cluster.environment if name.startswith("RAY_")} - told == {"RAY_USAGE_STATS_ENABLED"}
    assert "deploy/manta.env" in shell
    assert "ulimit -n 65536" in shell
