"""Small faulty programs and their repaired twins: each fault is found with its lines, no twin is called faulty.

The line that fails is marked `# where`, the line to change `# cause`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines, named_lines

PROGRAMS = Path(__file__).parent / "programs"
Rehearse = Callable[..., dict[str, Any]]

ONE_PROCESS = [
    ("position_ids", "device-mismatch"),
    ("detached_encoder", "no-gradient"),
    ("rnn_hidden_state", "device-mismatch"),
    ("class_weights", "device-mismatch"),
    ("moving_average", "device-mismatch"),
    ("metric_to_numpy", "device-mismatch"),
    ("own_momentum", "device-mismatch"),
    ("replaced_head", "no-gradient"),
    ("hidden_layers", "no-gradient"),
    ("uninitialised", "garbage-buffer"),
    ("loss_history", "graph-kept"),
    ("evaluation_graphs", "graph-kept"),
    ("not_finite", "non-finite"),
    ("backbone_without_grad", "no-gradient"),
    ("clip_before_unscale", "scaler-misuse"),
    ("log_of_zero", "non-finite"),
    ("half_eps", "non-finite"),
    ("hidden_row", "non-finite"),
    ("late_unfreezing", "no-gradient"),
    ("unscaled_backward", "scaler-misuse"),
    ("fakes_not_detached", "graph-kept"),
    ("padded_labels", "other-error"),
    ("no_collator", "batch-type"),
    ("changed_in_place", "other-error"),
    ("vision_question_key", "dataset-field"),
    ("vision_collate_on_gpu", "worker-uses-gpu"),
    ("vision_five_views", "batch-type"),
    ("streamed_reply", "dataset-field"),
    ("clip_frames", "batch-type"),
    ("stored_features", "batch-type"),
    ("unknown_keyword", "batch-type"),
    ("mapped_instruction", "dataset-field"),
    ("pinned_audio", "batch-type"),
    pytest.param("mapped_in_processes", "dataset-field", marks=pytest.mark.slow),
    pytest.param("caption_collator", "dataset-field", marks=pytest.mark.slow),
    pytest.param("tensor_in_reader", "worker-uses-gpu", marks=pytest.mark.slow),
]
TWO_RANKS = [
    ("broadcast_shapes", "ranks-disagree"),
    ("extra_barrier", "ranks-disagree"),
    ("early_return", "ranks-disagree"),
    ("lone_early_stop", "ranks-disagree"),
    ("evaluated_on_one", "ranks-disagree"),
    ("one_gpu_for_all", "placement-conflict"),
    ("nccl_on_host", "device-mismatch"),
    ("no_sync_always", "ddp-bypassed"),
    ("both_receive", "ranks-disagree"),
    ("sharded_on_one_gpu", "placement-conflict"),
    ("mesh_only", "ranks-disagree"),
    ("optimizer_before_sharding", "no-gradient"),
    ("vision_ready_twice", "ddp-ready-twice"),
    ("vision_output_field", "batch-type"),
    ("shared_block", "ddp-ready-twice"),
    pytest.param("extra_outputs", "batch-type", marks=pytest.mark.slow),
]


def check_pair(rehearse: Rehearse, name: str, kind: str, ranks: int | None) -> None:
    check_faulty(rehearse, name, kind, ranks)
    check_repaired(rehearse, name, ranks)


def check_faulty(rehearse: Rehearse, name: str, kind: str, ranks: int | None) -> None:
    """The faulty program: the kind, the lines that fail and the lines to change, and no other."""
    path = PROGRAMS / f"{name}.py"
    faulty = rehearse(str(path), ranks=ranks)
    assert faulty["verdict"] == "fault", faulty["text"]
    assert {finding["kind"] for finding in faulty["findings"]} == {kind}, faulty["text"]
    assert named_lines(faulty, "where") == marked_lines(path, "where"), faulty["text"]
    assert named_lines(faulty, "cause") == marked_lines(path, "cause"), faulty["text"]


def check_repaired(rehearse: Rehearse, name: str, ranks: int | None) -> None:
    """Its twin runs clean."""
    repaired = rehearse(str(PROGRAMS / f"{name}.py"), "fixed", ranks=ranks)
    # Some of them are about ranks or layers alone, and name no device.
    untouched = repaired["verdict"] == "unproven" and "nothing ran on a GPU" in "".join(repaired["notes"])
    assert repaired["verdict"] == "clean" or untouched, repaired["text"]
    assert repaired["findings"] == [], repaired["text"]
    assert "done" in repaired["stdout"]


@pytest.fixture
def as_it_imports(request: pytest.FixtureRequest, name: str) -> Rehearse:
    """Forks of a process that has imported what the program named so does."""
    text = (PROGRAMS / f"{name}.py").read_text()
    warmer = "from transformers" in text
    made: Rehearse = request.getfixturevalue("rehearse_warmer" if warmer else "rehearse_warm")
    return made


@pytest.mark.parametrize(("name", "kind"), ONE_PROCESS)
def test_one_process(as_it_imports: Rehearse, name: str, kind: str) -> None:
    check_pair(as_it_imports, name, kind, None)


@pytest.mark.parametrize(("name", "kind"), TWO_RANKS)
def test_two_ranks(as_it_imports: Rehearse, name: str, kind: str) -> None:
    check_pair(as_it_imports, name, kind, 2)


def test_ranks_that_see_one_gpu_each_do_not_share_it(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm(str(PROGRAMS / "one_gpu_for_all.py"), "visible", ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_static_graph(rehearse: Rehearse, ranks: int) -> None:
    """From a process of its own: forked from one that has torch loaded, DDP with a static graph may hang at its end."""
    check_faulty(rehearse, "static_output", "batch-type", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_static_graph_that_is_repaired(rehearse: Rehearse, ranks: int) -> None:
    check_repaired(rehearse, "static_output", ranks)


def test_a_tensor_in_host_memory_has_no_partner_to_go_to(rehearse_warm: Rehearse) -> None:
    (finding,) = rehearse_warm(str(PROGRAMS / "nccl_on_host.py"), ranks=2)["findings"]
    assert "works on the GPU alone" in finding["cause"]["why"]
    assert finding["fix"] == 'make it on the GPU: metric = torch.tensor([1.0, 2.0], device="cuda")'


def test_a_disagreement_names_both_sides(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm(str(PROGRAMS / "extra_barrier.py"), ranks=2)
    (finding,) = report["findings"]
    assert "rank 0 calls barrier" in finding["message"]
    assert "rank 1 calls all_reduce of 3 float32" in finding["message"]


def test_ddp_by_torchrun_runs_clean(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm("torchrun", "--nproc-per-node", "2", str(PROGRAMS / "ddp_training.py"))
    assert report["verdict"] == "clean", report["text"]
    assert report["steps"] == 8
    assert "done [{'rank': 0}, {'rank': 1}] nccl" in report["stdout"]
    assert report["memory"]["cuda:1"]["peak_bytes"] > 0


def test_a_sharded_optimizer_and_a_shuffled_evaluation_are_no_fault(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm(str(PROGRAMS / "zero_optimizer.py"), ranks=2)
    assert report["verdict"] == "clean", report["text"]
    assert report["findings"] == []


def test_ranks_that_drift_apart(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm(str(PROGRAMS / "ddp_training.py"), "apart", ranks=2)
    assert report["verdict"] == "fault"
    assert [finding["kind"] for finding in report["findings"]] == ["ranks-disagree"], report["text"]
    assert "weights of rank 0 and rank 1 differ" in report["findings"][0]["message"]


def test_a_head_that_the_loss_does_not_use_is_a_warning(rehearse_warm: Rehearse) -> None:
    report = rehearse_warm(str(PROGRAMS / "unused_head.py"))
    assert report["verdict"] == "clean", report["text"]
    assert [finding["severity"] for finding in report["findings"]] == ["warning"], report["text"]
    assert "extra.weight" in report["findings"][0]["message"]
    assert "side" not in report["findings"][0]["message"]
