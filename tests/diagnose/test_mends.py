"""What a line is mended with, read from its source: settings followed back, graphs kept, branches of a rank."""

from __future__ import annotations

import ast
import linecache
import textwrap
from pathlib import Path

import pytest

from trimtab.diagnose import (
    branches,
    loops_left,
    mends_graph,
    mends_in_place,
    mends_values,
    rewrite,
    source,
    trace,
)
from trimtab.diagnose.answers import Sides
from trimtab.diagnose.finding import Edit, Place


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text).lstrip())
    linecache.checkcache(str(path))
    source.tree.cache_clear()
    return str(path)


def line_of(file: str, part: str) -> int:
    return next(n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if part in text)


def after(file: str, edits: list[Edit], part: str) -> str:
    text = rewrite.applied(Path(file).read_text(), edits)
    ast.parse(text)
    return next(line.strip() for line in text.splitlines() if part in line)


SETTINGS = """
    class Config:
        rows: int = 32

    parser.add_argument("--max-rows", type=int, default=16)
    cfg = {"rows": 8}

    class Table:
        def __init__(self, rows, width=4):
            self.size = rows
            self.table = Embedding(self.size, width)

    table = Table(cfg["rows"])
    other = Thing(args.max_rows)
"""


@pytest.mark.parametrize(
    ("call", "position", "decided"),
    [("Embedding", 0, 'cfg = {"rows": 8}'), ("Embedding", 1, "def __init__"), ("Thing", 0, "--max-rows")],
)
def test_a_value_is_followed_back_to_its_setting(
    tmp_path: Path, call: str, position: int, decided: str
) -> None:
    file = written(tmp_path, SETTINGS)
    node = source.calls(file, call)[0]
    place, _ = trace.decided(file, node.lineno, node.args[position])
    assert place.line == line_of(file, decided)


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("y = encoder(x).detach() + 1", "y = encoder(x) + 1"),
        ("y = torch.tensor(terms, requires_grad=True)", "y = torch.stack(terms)"),
        ("total.append(loss.item())", "total.append(loss)"),
        ("with torch.no_grad():\n    y = f(x)", "with torch.enable_grad():"),
    ],
)
def test_a_cut_is_mended_in_its_place(tmp_path: Path, line: str, mended: str) -> None:
    file = written(tmp_path, f"terms.append(f(x))\n{line}\n")
    mend = mends_graph.of_cut(source.place(file, 2))
    assert mend is not None
    assert after(file, mend[1], mended) == mended


@pytest.mark.parametrize(
    ("line", "name", "dtype", "mended"),
    [
        ("y = (a - b).sqrt()", "sqrt", "float32", "y = ((a - b).clamp(min=1e-12)).sqrt()"),
        ("y = torch.log(p)", "log", "float32", "y = torch.log(p.clamp(min=1e-8))"),
        ("y = x / n.sum()", "div", "float32", "y = x / (n.sum() + 1e-8)"),
        ("y = x / (n.sum() + 1e-8)", "div", "float16", "y = x / (n.sum() + 1e-4)"),
        ("y = r.std(dim=1)", "std", "float32", "y = r.std(dim=1, correction=0)"),
        ("y = torch.acos(c)", "acos", "float32", "y = torch.acos(c.clamp(-1 + 1e-6, 1 - 1e-6))"),
    ],
)
def test_numbers_are_kept_finite_at_their_expression(
    tmp_path: Path, line: str, name: str, dtype: str, mended: str
) -> None:
    file = written(tmp_path, line + "\n")
    mend = mends_values.of_zero(source.place(file, 1), name, dtype)
    assert mend is not None
    assert after(file, mend[1], "y =") == mended


def test_an_eps_that_vanishes_is_changed_where_it_is_set(tmp_path: Path) -> None:
    file = written(tmp_path, "EPS = 1e-9\n\n\ndef unit(x):\n    return x / (x.norm() + EPS)\n")
    mend = mends_values.of_zero(source.place(file, 5), "div", "float16")
    assert mend is not None
    assert after(file, mend[1], "EPS =") == "EPS = 1e-4"


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("y = torch.log(torch.exp(x).sum(-1))", "y = torch.logsumexp(x, -1)"),
        ("y = (0.5 * v).exp()", "y = ((0.5 * v).clamp(max=80)).exp()"),
    ],
)
def test_an_exponential_is_bounded_or_taken_as_a_whole(tmp_path: Path, line: str, mended: str) -> None:
    file = written(tmp_path, line + "\n")
    node = next(call for call in source.calls(file, "exp"))
    assert after(file, mends_values.of_exp(file, node, "exp")[1], "y =") == mended


@pytest.mark.parametrize(
    ("call", "mended"),
    [
        ("AdamW(model.parameters())", "AdamW(model.parameters(), eps=1e-4)"),
        ("AdamW(p for p in ps)", "AdamW((p for p in ps), eps=0.0001)"),
        ("AdamW((ps))", "AdamW(ps, eps=0.0001)"),
        ("AdamW()", "AdamW(eps=1e-4)"),
    ],
)
def test_a_keyword_is_added_to_any_call(tmp_path: Path, call: str, mended: str) -> None:
    file = written(tmp_path, f"opt = {call}\n")
    edit = rewrite.add_keyword(file, source.calls(file, "AdamW")[0], "eps", "1e-4")
    assert after(file, [edit], "opt") == f"opt = {mended}"


UNTOLD = Sides((0, 1), ({}, {}))
"""Two ranks of whose values nothing is known."""

GUARDED = """
    def main():
        for step in range(10):
            train()
            if step % 5 == 0 and rank == 0:
                evaluate()
            if step >= limit:
                break
            if torch.isnan(loss):
                continue
            loss.backward()
"""


def test_the_condition_on_the_rank_is_found_where_the_ways_part(tmp_path: Path) -> None:
    file = written(tmp_path, GUARDED)
    under, beside = line_of(file, "evaluate()"), line_of(file, "train()")
    said = branches.guard([(file, under)], [(file, beside)], UNTOLD)
    assert said is not None
    assert said.cause.line == line_of(file, "rank == 0")
    assert after(file, said.edits, "% 5") == "if step % 5 == 0:"
    assert branches.guard([(file, under)], [(file, under)], UNTOLD) is None


def test_a_count_that_all_ranks_share_is_no_way_out(tmp_path: Path) -> None:
    file = written(tmp_path, GUARDED)
    said = loops_left.way_out([(file, line_of(file, "backward"))], 1, UNTOLD)
    assert said is not None
    assert said.cause.line == line_of(file, "isnan")
    assert loops_left.way_out([(file, line_of(file, "train()"))], 1, UNTOLD) is None


def test_a_statement_moves_only_where_nothing_needs_it_before(tmp_path: Path) -> None:
    text = "model = f()\nopt = g(model)\n{}\nmodel = h()\n"
    file = written(tmp_path, text.format("x = 1"))
    edits = mends_graph.move_behind(file, Place(file, 2), Place(file, 4))
    assert (
        rewrite.applied(Path(file).read_text(), edits) == "model = f()\nx = 1\nmodel = h()\nopt = g(model)\n"
    )
    file = written(tmp_path, text.format("opt.step()"))
    assert not mends_graph.move_behind(file, Place(file, 2), Place(file, 4))


@pytest.mark.parametrize(
    ("line", "filled", "mended"),
    [
        ("weights[mask] = -1e9", "mask", "weights = weights.masked_fill(mask, -1e9)"),
        ("weights[~self.keep] = 0.0", "mask", "weights = weights.masked_fill(~self.keep, 0.0)"),
        ("weights[:, 0] = 1.0", "part", "weights = weights.clone()"),
    ],
)
def test_a_number_is_written_into_a_new_tensor(
    tmp_path: Path, line: str, filled: mends_in_place.Filled, mended: str
) -> None:
    file = written(tmp_path, f"weights = scores.softmax(-1)\n{line}\nout = weights @ values\n")
    mend = mends_in_place.out_of_place(source.place(file, 2), filled)
    assert mend is not None
    assert mended in mend[0]
    assert after(file, mend[1], mended) == mended
