"""Invariants of policy versions: what is stored is what was published, and what was loaded."""

from steelyard.coordinator.audit_evidence import AuditStores, Facts, Findings, StoredVersion
from steelyard.coordinator.events import VersionPublished


def check_versions(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    """Published, stored and loaded weights are the same for every version that is not deleted."""
    for number, published in facts.published.items():
        if number not in facts.deleted:
            stored = findings.read("weights_stored", stores.weights.read, number)
            if stored is not None:
                _check_stored(number, published, stored, findings)
        _check_proofs(number, published, facts, findings)
    for number in (*facts.proofs, *facts.ready):
        known = number in facts.published
        findings.check("load_proofs", known, f"version {number} was loaded or READY, but never published")
    _note_blind_probes(facts, findings)


def check_checkpoints(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    """The last checkpoint is stored; every stored one has the digest that was journalled."""
    last = max(facts.checkpoints, default=None)
    for step, digest in facts.checkpoints.items():
        found = stores.checkpoints.digest(step)
        if found is None and step != last:
            continue
        message = f"the checkpoint of step {step} must have digest {digest}, has {found}"
        findings.check("checkpoints_stored", found == digest, message)


def _check_stored(number: int, published: VersionPublished, stored: StoredVersion, findings: Findings) -> None:
    manifest = stored.manifest
    separates = manifest.probe.separates_parent
    found = (manifest.version, manifest.step, manifest.parent_version, manifest.weights_digest, separates)
    wanted = (number, published.step, published.parent_version, published.weights_digest, published.separates_parent)
    message = (
        f"the manifest of version {number} must say (version, step, parent, weights, whether the probe tells it from "
        f"its parent) {wanted}, says {found}"
    )
    findings.check("weights_stored", found == wanted, message)
    inside = stored.weights_digest
    message = f"the files of version {number} must hold weights {published.weights_digest}, hold {inside}"
    findings.check("weights_stored", inside in (None, published.weights_digest), message)
    compatible = (manifest.model_config_digest, manifest.tokenizer_digest, manifest.template_digest)
    expected = (published.model_config_digest, published.tokenizer_digest, published.template_digest)
    message = f"version {number}: config, tokenizer and template must have digests {expected}, have {compatible}"
    findings.check("weights_stored", compatible == expected, message)
    actual = {file.name: file for file in stored.files}
    for file in manifest.files:
        message = f"version {number}: file {file.name} must be as in the manifest, {file}, is {actual.get(file.name)}"
        findings.check("weights_stored", actual.get(file.name) == file, message)


def _note_blind_probes(facts: Facts, findings: Findings) -> None:
    """Where the probe cannot tell a version from its parent, only the digest of memory proves which was loaded."""
    loaded = [number for number in facts.proofs if number in facts.published]
    children = [number for number in sorted(loaded) if facts.published[number].parent_version is not None]
    blind = [number for number in children if not facts.published[number].separates_parent]
    if blind:
        findings.note(
            "load_proofs",
            f"the probe cannot tell {len(blind)} of {len(children)} loaded versions from their parent, first version "
            f"{blind[0]}: that it was not the parent rests on the digest of what was in memory",
        )


def _check_proofs(number: int, published: VersionPublished, facts: Facts, findings: Findings) -> None:
    proofs = facts.proofs.get(number, [])
    if number in facts.ready:
        findings.check("load_proofs", bool(proofs), f"version {number} was READY without a load proof")
    for proof in proofs:
        same = proof.weights_digest == published.weights_digest
        message = (
            f"replica {proof.replica_id} held weights {proof.weights_digest} in memory as version {number}, "
            f"which was published as {published.weights_digest}"
        )
        findings.check("load_proofs", same, message)
        close = 0 <= proof.probe_max_error <= proof.probe_tolerance
        message = f"version {number}: probe error {proof.probe_max_error} exceeds {proof.probe_tolerance}"
        findings.check("load_proofs", close, message)
