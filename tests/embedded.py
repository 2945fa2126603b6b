"""Where the embedded model lies; tests that need it fail, rather than skip, when it is missing."""

import pathlib

MODEL = "models/SmolLM2-135M-Instruct"

if not pathlib.Path(MODEL, "config.json").is_file():
    raise RuntimeError(f"{MODEL} is missing: run `make model` once (it takes about a minute)")
