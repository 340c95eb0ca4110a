"""Audit of versions: what rests on which proof is said, and no proof is claimed that is not there."""

import msgspec

from steelyard.coordinator import events as e
from steelyard.testing.broken_run import BrokenRun, finished_run


def test_the_audit_says_which_loads_rest_on_the_digest_of_memory_alone() -> None:
    run = finished_run()
    report = run.audit()
    found = next(r for r in report.invariants if r.name == "load_proofs")
    blind = [v for v in run.stores.versions if v and not run.stores.versions[v].manifest.probe.separates_parent]
    assert found.num_broken == 0 and blind
    assert found.note is not None and found.note.startswith(f"the probe cannot tell {len(blind)} of ")
    assert f"first version {min(blind)}" in found.note
    assert any("note: the probe cannot tell" in line for line in report.lines())


def test_a_manifest_may_not_claim_that_its_probe_sees_more() -> None:
    run = BrokenRun()
    index, event = next((i, ev) for i, ev in run.events(e.VersionPublished) if ev.version == 1)
    run.replace(index, msgspec.structs.replace(event, separates_parent=False))
    assert "weights_stored" in run.rig.audit().broken
