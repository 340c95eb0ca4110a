"""What a published version promises, for engines that read the weights themselves. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from steelyard.types import Manifest, ParameterDigest
from steelyard.weights.compatibility import Compatibility, CompatibilityCheck
from steelyard.weights.manifest import check_files, check_same_parameters, read_manifest, weights_digest


class VersionReader:
    """Verifies versions that fit ``expected``; None takes the first version that is read as the measure."""

    def __init__(self, expected: Compatibility | None = None) -> None:
        self._compatibility = CompatibilityCheck(expected)

    def read(self, version_dir: str) -> Manifest:
        """Verify the files and the compatibility of a version.

        Raises:
            IntegrityError: names what is not as published, or not what the run started with.
        """
        directory = Path(version_dir)
        manifest = read_manifest(directory)
        check_files(directory, manifest)
        self._compatibility.check(directory, manifest)
        return manifest

    def check_parameters(self, manifest: Manifest, found: Sequence[ParameterDigest], where: str) -> None:
        """Compare parameters as they stand somewhere with the manifest.

        Raises:
            IntegrityError: names the parameter that differs.
        """
        check_same_parameters(manifest, found, where)

    def weights_digest(self, found: Sequence[ParameterDigest]) -> str:
        """One digest of all; comparable to ``Manifest.weights_digest``."""
        return weights_digest(found)
