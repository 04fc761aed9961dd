"""Programs in which an earlier deed makes a tensor wrong: that line is named, and the edits of its fix mend it.

The line that fails is marked `# where`, the line to change `# cause`. The repaired twin is the program with its edits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines, named_lines

from trimtab.diagnose.finding import Finding
from trimtab.diagnose.rewrite import applied

PROGRAMS = Path(__file__).parent / "programs"
Rehearse = Callable[..., dict[str, Any]]

DEEDS = [
    ("weight_by_data", "p.data = host.to(p.device)"),
    ("loss_with_weight", ".to(args.device)"),
    ("adapter_set_late", "Adapted(child).to(next(model.parameters()).device)"),
    ("moved_loop_variable", "batch = [t.to(device) for t in batch]"),
    ("table_of_first_gpu", "if self.rows is None or self.rows.device != x.device:"),
    ("average_before_move", "put self.model.to(self.device) before line 23"),
    ("resumed_before_move", "put model.to(device) before line 17"),
    ("world_by_default", "world = World(8, device=device)"),
    ("spectral_window", 'self.register_buffer("window", torch.hann_window(size), persistent=False)'),
    ("labels_as_floats", "torch.from_numpy(rows[:, -1]).long()"),
    ("state_in_object", "self.hidden = hidden.detach()"),
    ("prompt_no_leaf", "nn.Parameter(torch.randn(length, 4).to(device))"),
    ("moved_not_cast", "batch['x'].to(self.model.weight.dtype)"),
    ("noise_generator", "generator = torch.Generator(device=device).manual_seed(7)"),
]


@pytest.mark.parametrize(("name", "fix"), DEEDS)
def test_the_deed_is_named_and_its_edits_mend_the_program(
    rehearse_warm: Rehearse, tmp_path: Path, name: str, fix: str
) -> None:
    path = PROGRAMS / f"{name}.py"
    report = rehearse_warm(str(path))
    assert report["verdict"] == "fault", report["text"]
    assert named_lines(report, "where") == marked_lines(path, "where"), report["text"]
    assert named_lines(report, "cause") == marked_lines(path, "cause"), report["text"]
    findings = [Finding.from_dict(finding) for finding in report["findings"]]
    assert all(fix in finding.fix for finding in findings), report["text"]
    mended = tmp_path / path.name
    mended.write_text(applied(path.read_text(), dict.fromkeys(e for f in findings for e in f.edits)))
    repaired = rehearse_warm(str(mended))
    assert (repaired["verdict"], repaired["findings"]) == ("clean", []), repaired["text"]
    assert "done" in repaired["stdout"]
