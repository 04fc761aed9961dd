"""Errors about shapes, missing fields and unknown output fields: the line that decided, whatever words the error uses.

The line to change is marked `# CAUSE`; the program runs with its marks cut off. Where no line is marked, none may be
named but the failing one.
"""

from __future__ import annotations

import re
import textwrap
import traceback
from pathlib import Path

import pytest

from trimtab.diagnose import source
from trimtab.diagnose.causes import diagnose_exception
from trimtab.diagnose.finding import Finding
from trimtab.diagnose.raised_keys import likely
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer

HEAD = "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"


def raised(program: str, folder: Path) -> tuple[Finding, int | None]:
    """The finding for the error that ends a program, and the line of its mark."""
    lines = (HEAD + textwrap.dedent(program)).splitlines()
    marks = [number for number, line in enumerate(lines, 1) if line.endswith("# CAUSE")]
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text("\n".join(re.sub(r"\s*# CAUSE$", "", line) for line in lines) + "\n")
    namespace = {"__name__": "__main__", "__file__": str(path)}
    with virtual_gpus(1, observer=Observer()), pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    walked = traceback.walk_tb(caught.value.__traceback__)
    places = [source.place(frame.f_code.co_filename, line) for frame, line in walked][:0:-1]
    return diagnose_exception(caught.value, places), marks[0] if marks else None


SHAPES = {
    "an if, through a loader and a move": """
        rows = [torch.cat([torch.ones(1, 4) for _ in range(6)]) for _ in range(4)]  # CAUSE
        def take(tokens):
            if tokens.shape[1] != 8:
                raise RuntimeError("no")
        for batch in DataLoader(rows, batch_size=2):
            take(batch.cuda() * 2)
        """,
    "an assert on the last dimension": """
        weights = nn.Linear(3, 5)  # CAUSE
        hidden = weights(torch.ones(2, 3)).relu()
        assert hidden.size(-1) == 7
        """,
    "a name that was unpacked from the shape": """
        clip = torch.ones(2, 3, 9, 4)  # CAUSE
        clip = clip.transpose(1, 2).reshape(2, 9, 12).cuda()
        batch, frames = clip.shape[:2]
        if frames % 2 == 0:
            pass
        elif frames > 8:
            raise ValueError("too long")
        """,
    "the whole shape": """
        kept = torch.ones(5, 3)
        views = torch.stack([kept, kept, kept, kept], dim=1)  # CAUSE
        assert views.shape == (5, 2, 3), "shape"
        """,
    "a helper that is given the number": """
        def expect(got, want):
            if got != want:
                raise ValueError(f"{got} is not {want}")
        grid = torch.zeros(3, 3).repeat(1, 2)  # CAUSE
        expect(grid.shape[1], 3)
        """,
    "too many dimensions to unpack": """
        picture = torch.rand(3, 4, 4)[None]
        mask = torch.stack([picture, picture])  # CAUSE
        batch, channels, height, width = mask.shape
        """,
    "a return before the raise": """
        def forward(x):
            if x.shape[0] == 2:
                return x
            raise ValueError("no")
        forward(torch.ones(6, 2)[::2])  # CAUSE
        """,
    "a part of what a list holds": """
        parts = torch.arange(12).reshape(2, 6).split(4, dim=1)  # CAUSE
        assert {"left": parts[0]}["left"].ndim == 2
        left = parts[0].float()
        assert left.shape[1:] == (3,)
        """,
    "a condition that is not computed again": """
        grid = torch.ones(2, 5)  # CAUSE
        ready = True
        if ready and grid.size(1) % 2:
            raise ValueError("odd")
        """,
    "a tensor from a file": """
        import io
        file = io.BytesIO()
        torch.save({"x": torch.ones(4, 6)}, file)
        file.seek(0)
        stored = torch.load(file)  # CAUSE
        features = stored["x"].cuda()
        assert features.shape[1] == 8
        """,
    "a weight is as it was built": """
        table = nn.Embedding(10, 4)
        found = torch.ones(3, 5)  # CAUSE
        assert table.weight.shape[1] == found.shape[1]
        """,
}


@pytest.mark.parametrize("program", SHAPES.values(), ids=SHAPES)
def test_the_line_that_decided_a_refused_size(program: str, tmp_path: Path) -> None:
    finding, line = raised(program, tmp_path)
    assert finding.cause is not None
    assert finding.cause.line == line, finding.cause
    assert len(finding.tensors) == 1
    assert "decided here" in finding.cause.why


OTHER_REASONS = {
    "a condition that reads no shape": """
        x = torch.ones(3, 4)
        mode = "wide"
        if x.shape[0] == 2:
            raise ValueError("two")
        if mode != "narrow":
            raise ValueError(f"no such mode: {mode}")
        """,
    "a condition around it that does": """
        x, mode = torch.ones(3, 4), "wide"
        if x.ndim == 2:
            if mode == "wide":
                raise ValueError("mode")
        """,
    "a library raised it": """
        x = torch.ones(3, 4)
        if x.shape[0] == 3:
            x @ x
        """,
    "another part of the condition": """
        pair = (torch.ones(2), torch.ones(2))
        assert len(pair) == 3 and pair[0].shape == pair, "no"
        """,
    "a list of numbers": """
        sizes = [1, 2]
        assert len(sizes) == 3
        """,
}


@pytest.mark.parametrize("program", OTHER_REASONS.values(), ids=OTHER_REASONS)
def test_an_error_for_another_reason_names_no_shape(program: str, tmp_path: Path) -> None:
    finding, _ = raised(program, tmp_path)
    assert finding.tensors == []
    assert finding.vague


def test_a_refused_shape_is_told_with_both_numbers(tmp_path: Path) -> None:
    finding, _ = raised(SHAPES["an assert on the last dimension"], tmp_path)
    assert finding.kind == "batch-type"
    assert finding.cause is not None
    assert finding.cause.why.startswith(
        "hidden has the shape (2, 5) where the check at line 7 wants 7; the 5 of"
    )
    assert "make it 7 there" in finding.fix


KEYS = {
    "a row": ("row['query']", "row = {'image': 1, 'query': 'a', 'label': 2}\nrow['question']\n"),
    "inside a row": (
        "row['meta']['author_name']",
        "row = {'meta': {'author_name': 1}}\nrow['meta']['authorName']\n",
    ),
    "in a comprehension": (
        "r['text']",
        "rows = [{'text': 'a', 'score': 1}]\n[r['sentence'] for r in rows]\n",
    ),
    "taken out": ("row['labels']", "row = {'ids': 1, 'labels': 2}\nrow.pop('label')\n"),
}


@pytest.mark.parametrize(("read", "program"), KEYS.values(), ids=KEYS)
def test_the_field_that_is_meant(read: str, program: str, tmp_path: Path) -> None:
    finding, _ = raised(program, tmp_path)
    assert finding.cause is not None
    assert finding.where is not None
    assert finding.cause.line == finding.where.line
    assert f"read {read} here" in finding.fix


def test_what_the_line_does_not_name_is_not_taken_for_the_row(tmp_path: Path) -> None:
    program = "config = {'query': 1}\ndef read(get):\n    return get('question')\nread({'a': {}}['a'].__getitem__)\n"
    finding, _ = raised(program, tmp_path)
    assert "the fields that are there" not in finding.message


def test_a_row_of_a_table_has_its_columns(tmp_path: Path) -> None:
    program = """
        class Table:
            column_names = ["query", "label"]
            def __getitem__(self, index):
                return {"query": 1, "label": 2}
        table = Table()
        table[0]["question"]
        """
    finding, _ = raised(program, tmp_path)
    assert "read table[0]['query'] here" in finding.fix


def test_an_index_that_is_a_tensor_is_no_field(tmp_path: Path) -> None:
    program = "x, row = torch.ones(3), {'a': 1}\nx[torch.tensor([0, 1])].sum() + row['b']\n"
    finding, _ = raised(program, tmp_path)
    assert "(the fields that are there: a)" in finding.message


def test_a_field_that_nothing_resembles_is_not_guessed(tmp_path: Path) -> None:
    assert likely("bounding_box", ["image", "query", "label"]) is None
    finding, _ = raised("row = {'image': 1, 'query': 2}\nrow['bounding_box']\n", tmp_path)
    assert finding.cause is not None
    assert finding.cause.why.startswith("row has the fields image, query, and no 'bounding_box'")
    assert "likely" not in finding.cause.why


@pytest.mark.parametrize(
    ("key", "fields", "meant"),
    [
        ("answer", ["answers", "label"], "answers"),
        ("question", ["image", "query", "questionId"], "query"),
        ("imageId", ["image", "image_id"], "image_id"),
        ("anwser", ["image", "answer"], "answer"),
        ("images", ["messages", "image"], "image"),
    ],
)
def test_names_that_mean_one_thing(key: str, fields: list[str], meant: str) -> None:
    assert likely(key, fields) == meant


OUTPUTS = {
    "an item": """
        def forward(self, x):
            out = Output(loss=x)
            out["gates"] = x  # CAUSE
            return out
        """,
    "by a function": """
        def forward(self, x):
            out = Output(loss=x)
            out.__setitem__("gates", x)  # CAUSE
            return out
        """,
    "gathered before": """
        def forward(self, x):
            extra = {"other": x,
                     "gates": x}  # CAUSE
            out = Output(loss=x)
            for key, value in extra.items():
                out[key] = value
            return out
        """,
    "gathered by keyword": """
        def forward(self, x):
            extra = dict(gates=x)  # CAUSE
            out = Output(loss=x)
            for key in extra:
                out[key] = extra[key]
            return out
        """,
    "unpacked into the class": """
        def forward(self, x):
            fields = {"loss": x}
            fields["gates"] = x  # CAUSE
            return Output(**fields)
        """,
    "an unknown keyword": """
        def forward(self, x):
            return Output(loss=x, gates=x)  # CAUSE
        """,
}


@pytest.mark.parametrize("forward", OUTPUTS.values(), ids=OUTPUTS)
def test_the_line_that_writes_an_unknown_output_field(forward: str, tmp_path: Path) -> None:
    body = textwrap.indent(textwrap.dedent(forward), "    ")
    program = (
        "class Output(dict):\n    def __init__(self, loss=None, other=None):\n        super().__init__(loss=loss)\n"
        "batch = {}\nbatch['gates'] = 3\n"
        f"class Model(nn.Module):\n{body}\n"
        "def rebuilt(self, x):\n    return Output(**self(x))\n"
        "rebuilt(Model(), torch.ones(2))\n"
    )
    finding, line = raised(program, tmp_path)
    assert finding.cause is not None
    assert (finding.kind, finding.cause.line) == ("batch-type", line), finding
    assert "declare it" in finding.fix


def test_variables_of_the_machine_are_not_fields_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("SOMEBODYS_SECRET", "1")
    finding, _ = raised('import os\nrank = int(os.environ["LOCAL_RANK"])\n', tmp_path)
    assert finding.kind == "stale-launcher"
    assert "fields" not in f"{finding.message} {finding.cause}"
