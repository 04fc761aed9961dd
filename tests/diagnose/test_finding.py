"""Findings: their JSON form, and when two are the same."""

from __future__ import annotations

import json

import pytest

from trimtab.diagnose.finding import KINDS, Cause, Finding, Place, TensorNote


def finding(**changes: object) -> Finding:
    values: dict[str, object] = {
        "kind": "device-mismatch",
        "message": "Expected all tensors to be on the same device",
        "where": Place("train.py", 41, "out = model(ids)"),
        "cause": Cause("train.py", 18, "ids.to(device)", "the result was dropped"),
        "fix": "ids = ids.to(device)",
        "tensors": [TensorNote("ids", "cpu", "int64", (2, 16), Place("train.py", 17))],
    }
    return Finding(**(values | changes))  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    original = finding(op="aten.embedding", module="embed", count=3, library=Place("lib.py", 7, "x"))
    assert Finding.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_json_has_the_documented_fields() -> None:
    data = json.loads(json.dumps(finding().to_dict()))
    documented = {"kind", "severity", "message", "where", "cause", "fix", "op", "module", "tensors"}
    assert documented <= set(data)
    assert data["tensors"][0]["shape"] == [2, 16]
    assert data["cause"]["why"] == "the result was dropped"
    assert finding(where=None, cause=None).to_dict()["where"] is None


def test_the_same_fault_has_the_same_key() -> None:
    assert finding().key() == finding(message="other words", count=7).key()
    assert finding().key() != finding(kind="index-device").key()
    assert finding().key() != finding(where=Place("train.py", 42, "")).key()
    assert finding(where=None, cause=None).key() != finding(where=None, cause=None, message="another").key()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        Finding(kind="bad-luck")
    assert all(KINDS.values())
