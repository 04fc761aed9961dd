"""Small faulty programs and their repaired twins: each fault is found with its line, no twin is called faulty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
Rehearse = Callable[..., dict[str, Any]]

slow = pytest.mark.slow
ONE_PROCESS = [
    pytest.param("position_ids", "device-mismatch"),
    pytest.param("detached_encoder", "no-gradient", marks=slow),
    pytest.param("rnn_hidden_state", "device-mismatch", marks=slow),
    pytest.param("class_weights", "device-mismatch", marks=slow),
    pytest.param("moving_average", "device-mismatch", marks=slow),
    pytest.param("metric_to_numpy", "device-mismatch", marks=slow),
    pytest.param("own_momentum", "device-mismatch", marks=slow),
    pytest.param("replaced_head", "no-gradient", marks=slow),
    pytest.param("hidden_layers", "no-gradient", marks=slow),
    pytest.param("uninitialised", "garbage-buffer", marks=slow),
    pytest.param("loss_history", "graph-kept", marks=slow),
    pytest.param("evaluation_graphs", "graph-kept", marks=slow),
    pytest.param("not_finite", "non-finite", marks=slow),
    pytest.param("backbone_without_grad", "no-gradient", marks=slow),
    pytest.param("clip_before_unscale", "scaler-misuse", marks=slow),
    pytest.param("log_of_zero", "non-finite", marks=slow),
    pytest.param("changed_in_place", "other-error", marks=slow),
]
TWO_RANKS = [
    pytest.param("broadcast_shapes", "ranks-disagree"),
    pytest.param("extra_barrier", "ranks-disagree", marks=slow),
    pytest.param("early_return", "ranks-disagree", marks=slow),
    pytest.param("one_gpu_for_all", "placement-conflict", marks=slow),
    pytest.param("nccl_on_host", "device-mismatch", marks=slow),
    pytest.param("no_sync_always", "ddp-bypassed", marks=slow),
    pytest.param("both_receive", "ranks-disagree", marks=slow),
    pytest.param("sharded_on_one_gpu", "placement-conflict", marks=slow),
    pytest.param("mesh_only", "ranks-disagree", marks=slow),
    pytest.param("optimizer_before_sharding", "no-gradient", marks=slow),
]


def marked_line(path: Path) -> int:
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith("# here"))


def named_lines(report: dict[str, Any]) -> set[int]:
    return {
        finding[key]["line"] for finding in report["findings"] for key in ("where", "cause") if finding[key]
    }


def check_pair(rehearse: Rehearse, name: str, kind: str, ranks: int | None) -> None:
    path = PROGRAMS / f"{name}.py"
    faulty = rehearse(str(path), ranks=ranks)
    assert faulty["verdict"] == "fault", faulty["text"]
    assert kind in {finding["kind"] for finding in faulty["findings"]}, faulty["text"]
    assert marked_line(path) in named_lines(faulty), faulty["text"]
    repaired = rehearse(str(path), "fixed", ranks=ranks)
    assert repaired["verdict"] == "clean", repaired["text"]
    assert "done" in repaired["stdout"]


@pytest.mark.parametrize(("name", "kind"), ONE_PROCESS)
def test_one_process(rehearse: Rehearse, name: str, kind: str) -> None:
    check_pair(rehearse, name, kind, None)


@pytest.mark.parametrize(("name", "kind"), TWO_RANKS)
def test_two_ranks(rehearse: Rehearse, name: str, kind: str) -> None:
    check_pair(rehearse, name, kind, 2)


@pytest.mark.slow
def test_a_tensor_in_host_memory_has_no_partner_to_go_to(rehearse: Rehearse) -> None:
    (finding,) = rehearse(str(PROGRAMS / "nccl_on_host.py"), ranks=2)["findings"]
    assert "works on the GPU alone" in finding["cause"]["why"]
    assert finding["fix"] == "make it on the GPU: metric = torch.tensor([1.0, 2.0], device='cuda')"


@pytest.mark.slow
def test_a_disagreement_names_both_sides(rehearse: Rehearse) -> None:
    report = rehearse(str(PROGRAMS / "extra_barrier.py"), ranks=2)
    (finding,) = report["findings"]
    assert "rank 0 calls barrier" in finding["message"]
    assert "rank 1 calls all_reduce of 3 float32" in finding["message"]


def test_ddp_by_torchrun_runs_clean(rehearse: Rehearse) -> None:
    report = rehearse("torchrun", "--nproc-per-node", "2", str(PROGRAMS / "ddp_training.py"))
    assert report["verdict"] == "clean", report["text"]
    assert report["steps"] == 8
    assert "done [{'rank': 0}, {'rank': 1}] nccl" in report["stdout"]
    assert report["memory"]["cuda:1"]["peak_bytes"] > 0


def test_a_sharded_optimizer_and_a_shuffled_evaluation_are_no_fault(rehearse: Rehearse) -> None:
    report = rehearse(str(PROGRAMS / "zero_optimizer.py"), ranks=2)
    assert report["verdict"] == "clean", report["text"]
    assert report["findings"] == []


@pytest.mark.slow
def test_ranks_that_drift_apart(rehearse: Rehearse) -> None:
    report = rehearse(str(PROGRAMS / "ddp_training.py"), "apart", ranks=2)
    assert report["verdict"] == "fault"
    assert [finding["kind"] for finding in report["findings"]] == ["ranks-disagree"], report["text"]
    assert "weights of rank 0 and rank 1 differ" in report["findings"][0]["message"]


@slow
def test_a_head_that_the_loss_does_not_use_is_a_warning(rehearse: Rehearse) -> None:
    report = rehearse(str(PROGRAMS / "unused_head.py"))
    assert report["verdict"] == "clean", report["text"]
    assert [finding["severity"] for finding in report["findings"]] == ["warning"], report["text"]
    assert "extra.weight" in report["findings"][0]["message"]
