"""The manifest of a version directory, and the digests in it. Imports no torch.

A version directory is a Hugging Face directory (config, tokenizer, safetensors) with ``manifest.json``, written last.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from steelyard.digests import digest_bytes, digest_file
from steelyard.errors import IntegrityError
from steelyard.types import FileDigest, Manifest, ParameterDigest

MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.json"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_NAMES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
COMPANION_NAMES = (*TOKENIZER_NAMES, TEMPLATE_NAME, "generation_config.json")
"""Files of a Hugging Face directory that no training step changes."""

_VOLATILE_CONFIG_KEYS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of config.json that do not change what the parameters mean."""


def version_dir_name(version: int) -> str:
    """Directory name of a version: ``v000007``."""
    return f"v{version:06d}"


def weights_digest(parameters: Iterable[ParameterDigest]) -> str:
    """One digest over all parameters, whatever their order: over the sorted (name, dtype, shape, digest) lines."""
    lines = sorted(f"{p.name} {p.dtype} {'x'.join(map(str, p.shape))} {p.digest}" for p in parameters)
    return digest_bytes("\n".join(lines).encode())


def model_config_digest(directory: Path) -> str:
    """Digest of the model's architecture: config.json without keys that only describe the file."""
    return digest_bytes(json.dumps(read_model_config(directory), sort_keys=True).encode())


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json without its volatile keys.

    Raises:
        IntegrityError: there is no config.json, or it is no JSON object.
    """
    path = directory / CONFIG_NAME
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} must be a model config in JSON: {error}") from error
    if not isinstance(config, dict):
        raise IntegrityError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}


def tokenizer_digest(directory: Path) -> str:
    """Digest over the names and bytes of the tokenizer's files."""
    present = [name for name in TOKENIZER_NAMES if (directory / name).is_file()]
    return digest_bytes("\n".join(f"{name} {digest_file(directory / name)[0]}" for name in present).encode())


def template_digest(directory: Path) -> str:
    """Digest of the chat template: the text of its file; empty text where the tokenizer's config holds it."""
    path = directory / TEMPLATE_NAME
    return digest_bytes(path.read_bytes() if path.is_file() else b"")


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: readable, one digest a line, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a published version.

    Raises:
        IntegrityError: the directory has none (it was never published whole), or it is malformed.
    """
    path = directory / MANIFEST_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise IntegrityError(f"{directory} must hold {MANIFEST_NAME}: it is no published version") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{path} must be a manifest: {error}") from error


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare each file with its size and digest in the manifest.

    Raises:
        IntegrityError: names the first file that is missing or differs.
    """
    for expected in manifest.files:
        path = directory / expected.name
        try:
            digest, num_bytes = digest_file(path)
        except OSError as error:
            raise IntegrityError(f"version {manifest.version}: {path} must be readable: {error}") from error
        if (digest, num_bytes) != (expected.digest, expected.num_bytes):
            raise IntegrityError(
                f"version {manifest.version}: {path} must have digest {expected.digest} over {expected.num_bytes} "
                f"bytes, got {digest} over {num_bytes}"
            )


def file_digest(path: Path) -> FileDigest:
    """Size and digest of one file, by its name."""
    digest, num_bytes = digest_file(path)
    return FileDigest(name=path.name, num_bytes=num_bytes, digest=digest)


def check_same_parameters(expected: Manifest, actual: Iterable[ParameterDigest], where: str) -> None:
    """Compare parameters as they stand somewhere with the manifest.

    Raises:
        IntegrityError: names the first parameter that is missing, not promised, or differs, and in what.
    """
    want = {parameter.name: parameter for parameter in expected.parameters}
    have = {parameter.name: parameter for parameter in actual}
    for name in sorted(want.keys() | have.keys()):
        if name not in have or name not in want:
            problem = "is missing" if name not in have else "was not published"
            raise IntegrityError(f"version {expected.version}: parameter {name} {problem} in {where}")
        for field in ("shape", "dtype", "digest"):
            wanted, got = getattr(want[name], field), getattr(have[name], field)
            if wanted != got:
                raise IntegrityError(
                    f"version {expected.version}: {field} of parameter {name} in {where} must be {wanted}, got {got}"
                )
