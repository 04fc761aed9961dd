"""One fault, one finding: what only follows from another finding is put under it. Plain data in, plain data out.

Nothing is dropped: a report still shows, under the first cause, where else it was met and what came of it.
"""

from __future__ import annotations

from trimtab.diagnose.finding import Finding

_BRINGS: dict[str, frozenset[str]] = {
    # Memory that was never written holds NaN here, and what is computed from it too.
    "garbage-buffer": frozenset({"non-finite"}),
    # The first number that is not finite makes those after it so.
    "non-finite": frozenset({"non-finite"}),
    "graph-kept": frozenset({"out-of-memory"}),
    # A GPU that is full has no room for anything after either.
    "out-of-memory": frozenset({"out-of-memory"}),
    # A scaler that saw no gradient complains about its own.
    "no-gradient": frozenset({"scaler-misuse", "no-gradient"}),
    # Ranks that average nothing drift apart.
    "ddp-bypassed": frozenset({"ranks-apart", "ranks-disagree"}),
    "ranks-apart": frozenset({"ranks-disagree"}),
    "ddp-unused": frozenset({"no-gradient"}),
    "stale-launcher": frozenset({"ranks-disagree", "placement-conflict"}),
    # Two ranks on one GPU: NCCL refuses it, memory is shared, tensors are where a rank does not expect them.
    "placement-conflict": frozenset(
        {"placement-conflict", "device-mismatch", "out-of-memory", "ranks-disagree"}
    ),
}
"""Kinds that a finding of a kind is known to bring about."""


def fold(findings: list[Finding]) -> list[Finding]:
    """The findings without those that follow from another one, which go under it; in their order."""
    stands: list[Finding] = []
    roots = _roots(findings)
    for finding in findings:
        root = next((one for one in roots if one is not finding and _brought(finding, one, findings)), None)
        same = next((one for one in stands if _same_line(finding, one)), None)
        above = same or _repaired(finding, stands) or root
        if above is None:
            stands.append(finding)
        else:
            above.follows.append(finding)
    return stands


def _repaired(finding: Finding, stands: list[Finding]) -> Finding | None:
    """The fault whose repaired result is what this one meets: in the wrong precision still, or picked on another device
    than the program would have picked it on."""
    if (cause := finding.cause) is None or finding.kind not in ("dtype-mismatch", "device-mismatch"):
        return None
    before = "dtype-mismatch" if finding.kind == "dtype-mismatch" else "index-device"
    born = {(t.born.file, t.born.line) for t in finding.tensors if t.born is not None and finding.vague}
    blamed = {(cause.file, cause.line)} if finding.kind == "dtype-mismatch" else born
    for one in stands:
        if one.kind == before and one.where is not None and (one.where.file, one.where.line) in blamed:
            return one
    return None


def _roots(findings: list[Finding]) -> list[Finding]:
    """What other findings may follow from: the first fault of each kind that brings others about."""
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.severity == "fault" and finding.kind in _BRINGS:
            first.setdefault(finding.kind, finding)
    # A root that itself follows from another one hands on what it brings.
    return [
        one
        for one in first.values()
        if not any(one is not other and one.kind in _BRINGS[other.kind] for other in first.values())
    ]


def _brought(finding: Finding, root: Finding, findings: list[Finding]) -> bool:
    brings = set(_BRINGS[root.kind])
    for other in findings:
        if other.kind in brings:
            brings |= _BRINGS.get(other.kind, frozenset())
    if finding.kind not in brings:
        return False
    # Two faults of one kind are one only when nothing speaks for a cause of its own.
    return finding.kind not in (root.kind, "device-mismatch") or _no_cause_of_its_own(finding, root)


def _no_cause_of_its_own(finding: Finding, root: Finding) -> bool:
    return finding.vague or finding.severity == "warning" or _same_line(finding, root)


def _same_line(finding: Finding, other: Finding) -> bool:
    """Whether one line is to be changed for both, and changed alike."""
    if finding.cause is None or other.cause is None or other.severity != "fault":
        return False
    places = {(cause.file, cause.line) for cause in (finding.cause, other.cause)}
    return len(places) == 1 and (finding.kind == other.kind or finding.fix == other.fix)
