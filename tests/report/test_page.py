"""The HTML page of a rehearsal: everything is on it, and nothing in it is taken for markup."""

from __future__ import annotations

from html.parser import HTMLParser

from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.rehearse.report import render
from trimtab.rehearse.session import AskedAt
from trimtab.rehearse.verdict import Result
from trimtab.report.rehearsal import rehearsal_page


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onerror"}


def page(message: str) -> str:
    finding = Finding(
        kind="device-mismatch",
        message=message,
        where=Place("train.py", 41, "loss = f(<x>)"),
        cause=Cause("train.py", 18, "x = torch.ones(3)", "made here on cpu & never moved"),
        fix="x = x.to(device)",
    )
    memory = {"cuda:0": {"peak_bytes": 2**20, "capacity_bytes": 2**30}}
    return rehearsal_page(Result("fault", [finding], memory, 3, 1.5, ["a <note>"], "train.py").to_dict())


def test_a_page_holds_the_finding_and_the_verdict() -> None:
    text = page("tensors on two devices")
    for part in (
        "fault: 1 fault",
        "tensors on two devices",
        "train.py:41",
        "train.py:18",
        "x = x.to(device)",
        "1\N{NO-BREAK SPACE}MiB",
    ):
        assert part in text


def test_texts_of_a_program_are_no_markup() -> None:
    text = page("<script>alert(1)</script><img src=x onerror=alert(1)>")
    tags = _Tags()
    tags.feed(text)
    assert not tags.seen & {"script", "img"}
    for escaped in ("&lt;script&gt;", "f(&lt;x&gt;)", "a &lt;note&gt;"):
        assert escaped in text


def test_what_shapes_do_not_prove_is_on_the_page() -> None:
    asked = AskedAt("decision", "Tensor.__bool__", Place("train.py", 7, "if loss < limit:"), None)
    text = rehearsal_page(
        Result("unproven", [], {}, 1, 1.5, [], "train.py", shapes_only=True, asked=[asked]).to_dict()
    )
    assert "unproven in shapes" in text
    assert "train.py:7" in text
    assert "if loss &lt; limit:" in text


def test_notes_of_a_clean_rehearsal_are_told_everywhere() -> None:
    notes = ["rank 0 of 8 stands for all", "it was called as torchrun calls it"]
    result = Result("clean", [], {}, 3, 1.5, notes, "train.py")
    lines = render(result).splitlines()
    assert [line.split(maxsplit=1) for line in lines if line.strip()][:-1] == [
        ["note", note] for note in notes
    ]
    assert lines[-1].startswith("clean: train.py ran without a fault")
    assert result.to_dict()["notes"] == notes
    assert all(f"<p>{note}</p>" in rehearsal_page(result.to_dict()) for note in notes)
