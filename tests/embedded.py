"""Where the embedded model lies, and a short one made of it; tests that need it fail, rather than skip, when it is
missing."""

import functools
import json
import pathlib
import shutil
import tempfile

MODEL = "models/SmolLM2-135M-Instruct"

if not pathlib.Path(MODEL, "config.json").is_file():
    raise RuntimeError(f"{MODEL} is missing: run `make model` once (it takes about a minute)")


@functools.cache
def short_model() -> str:
    """Return the folder of a model that has the embedded one's tokenizer and sizes, but 4 of its 30 blocks; make it
    beside that one if it is not there.

    What it writes is noise, for a quarter of the cost: it serves tests of what is done with tokens, whatever they say.
    """
    from safetensors import safe_open  # here: most importers want the path alone
    from safetensors.torch import save_file

    num_layers, source = 4, pathlib.Path(MODEL)
    folder = source.with_name(f"{source.name}-{num_layers}-blocks")
    if folder.is_dir() and folder.stat().st_mtime > (source / "model.safetensors").stat().st_mtime:
        return str(folder)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=source.parent) as made:
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja") and file.name != "manifest.json":
                shutil.copy(file, made)
        config = json.loads((source / "config.json").read_text())
        pathlib.Path(made, "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
        left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, config["num_hidden_layers"]))
        with safe_open(source / "model.safetensors", framework="pt") as weights:
            names = [name for name in weights.keys() if not name.startswith(left_out)]  # noqa: SIM118 - no dictionary
            kept = {name: weights.get_tensor(name) for name in names}
        save_file(kept, pathlib.Path(made, "model.safetensors"))
        try:
            pathlib.Path(made).rename(folder)
        except OSError:  # another process was quicker
            assert (folder / "model.safetensors").is_file()
        else:
            pathlib.Path(made).mkdir()  # for the context, which removes it
    return str(folder)
