"""What every version of a run must share. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import IntegrityError
from steelyard.types import Manifest
from steelyard.weights.manifest import model_config_digest, template_digest, tokenizer_digest


@dataclass(frozen=True)
class Compatibility:
    """What every version of a run must share with its starting policy, as digests."""

    model_config_digest: str
    tokenizer_digest: str
    template_digest: str

    @classmethod
    def of_directory(cls, directory: Path) -> "Compatibility":
        """Read them from a Hugging Face directory (the starting policy, or any version)."""
        return cls(model_config_digest(directory), tokenizer_digest(directory), template_digest(directory))

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> "Compatibility":
        """Read them from a manifest."""
        return cls(manifest.model_config_digest, manifest.tokenizer_digest, manifest.template_digest)


class CompatibilityCheck:
    """Compares versions with ``expected``; None takes the first version that is checked as the measure."""

    def __init__(self, expected: Compatibility | None = None) -> None:
        self._expected = expected

    def check(self, directory: Path, manifest: Manifest) -> None:
        """The files agree with the manifest by digest already; here the manifest must agree with itself and the run.

        Raises:
            IntegrityError: names what differs.
        """
        actual = Compatibility.of_directory(directory)
        _check_equal(manifest.version, "the manifest", Compatibility.of_manifest(manifest), actual)
        if self._expected is None:
            self._expected = actual
        _check_equal(manifest.version, "the run", self._expected, actual)


def _check_equal(version: int, owner: str, expected: Compatibility, actual: Compatibility) -> None:
    for what, wanted, got in (
        ("model config", expected.model_config_digest, actual.model_config_digest),
        ("tokenizer", expected.tokenizer_digest, actual.tokenizer_digest),
        ("chat template", expected.template_digest, actual.template_digest),
    ):
        if wanted != got:
            raise IntegrityError(f"version {version}: its {what} must be that of {owner} ({wanted}), got {got}")
