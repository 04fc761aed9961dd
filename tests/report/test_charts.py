"""Charts as data in a page, the library that draws them, and what a page permits."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import trimtab
from trimtab.report.charts import LEGEND, Chart, Line, Mark, Peak, bars, embedded, figure, length
from trimtab.report.frame import page

Parse = Callable[[str], Any]
VENDOR = files("trimtab.report").joinpath("vendor")


def test_the_library_is_as_it_was_released() -> None:
    told = VENDOR.joinpath("README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", told, flags=re.MULTILINE))
    kept = {file.name for file in VENDOR.iterdir()} - {"README.md"}
    assert set(listed) == kept == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, wanted in listed.items():
        assert hashlib.sha256(VENDOR.joinpath(name).read_bytes()).hexdigest() == wanted, name
    version = re.search(
        r"uPlot \(v([\d.]+)\)", VENDOR.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8")
    )
    assert version is not None
    assert f"| {version[1]} | MIT |" in told


def test_no_file_of_a_page_is_ignored_by_git() -> None:
    """The wheel holds what git holds of the package."""
    root = Path(trimtab.__file__).parents[2]
    ignored = (root / ".gitignore").read_text().split()
    assert not {"vendor", "vendor/", "assets", "assets/", "*.js", "*.css", "*.min.js"} & set(ignored)


def test_a_page_permits_its_own_scripts_and_nothing_else(parse: Parse) -> None:
    drawn = page("t", [figure(Chart("c", "x", "y", [Line("a", [(1, 2)])]))])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', drawn)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    inside = re.findall(r"<script>(.*?)</script>", drawn, flags=re.DOTALL)
    assert len(inside) == 2
    for script in inside:
        coded = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{coded}'" in policy[1]
    assert "http:" not in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "Copyright (c) 2022 Leon Sorokin" in drawn  # its licence goes with each copy
    parse(drawn)


def test_a_page_without_a_chart_carries_no_script() -> None:
    plain = page("t", [bars("Peak", {"a": 1.0}, "GiB")])
    assert "<script" not in plain
    assert "script-src 'none'" in plain
    assert "uPlot" not in plain


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&amp;", "\u2028\u2029", "\ud83d", "\x00", "é"])
def test_data_in_a_page_is_no_markup_and_comes_back_whole(text: str) -> None:
    inside = embedded({text: [text, 1.5, None]})
    assert json.loads(inside) == {text: [text, 1.5, None]}
    assert inside.isascii()
    assert not set(inside) & set("<>&")


def test_lines_share_their_places(parse: Parse) -> None:
    lines = [Line("a", [(3, 1.0), (1, 0.5)], [(1, 0.0, 1.0)]), Line("b", [(2, 7.0), (2, 8.0), (4, math.inf)])]
    told = parse(figure(Chart("c", "x", "y", lines, levels={"even": 2.0, "none": math.nan})))
    chart = told.charts["c"]
    assert chart["at"] == [1, 2, 3]
    assert [line["values"] for line in chart["series"]] == [[0.5, None, 1], [None, 8, None], [2, 2, 2]]
    assert (chart["series"][0]["low"], chart["series"][0]["high"]) == ([0, None, None], [1, None, None])
    assert "1 value not finite, and so not drawn" in told.text


def test_a_chart_of_levels_alone_is_bars(parse: Parse) -> None:
    told = parse(figure(Chart("zero-shot", "x", "score", [Line("a", [])], levels={"zero-shot": 55.0})))
    assert not told.charts
    assert "55 score" in told.text
    assert figure(Chart("empty", "x", "y", [])) == ""


def test_a_long_name_is_cut_and_a_turned_one_is_not_turned(parse: Parse) -> None:
    told = parse(
        figure(Chart("t" * 500, "x", "y", [Line("n" * 500, [(1, 1)]), Line("\u202egnp.exe", [(1, 1)])]))
    )
    ((title, chart),) = told.charts.items()
    assert len(title) == LEGEND
    assert [len(line["name"]) for line in chart["series"]] == [LEGEND, 8]
    assert "\u202e" not in json.dumps(chart, ensure_ascii=False) + told.text


def test_a_long_chart_has_a_short_table_with_its_peak(parse: Parse) -> None:
    points = [(float(n), 1.0) for n in range(400)]
    points[123] = (123.0, 98765.0)
    stack = Chart("c", "place", "GiB", [Line("weights", points)], kind="stack", peak=Peak(123, 98765, "peak"))
    told = parse(figure(stack))
    assert told.points("c") == [400]
    assert len(told.all("tr")) <= 103
    assert "98,765" in told.text
    assert "of 400 places" in told.text


def test_dots_keep_their_names_and_places(parse: Parse) -> None:
    lines = [
        Line("fits", [(8, 3), (8, 4), (2, 9)], names=["b", "c", "a"]),
        Line("not", [(9, 1)], names=["d"]),
    ]
    chart = parse(
        figure(Chart("c", "GiB", "tokens/s", lines, kind="dots", marks=[Mark(8.5, "80 GB")]))
    ).charts["c"]
    assert (chart["at"], chart["names"]) == ([2, 8, 8, 9], ["a", "b", "c", "d"])
    assert [line["values"] for line in chart["series"]] == [[9, 3, 4, None], [None, None, None, 1]]
    assert chart["marks"] == [{"at": 8.5, "name": "80 GB"}]


def test_bars_are_as_long_as_their_values(parse: Parse) -> None:
    told = parse(bars("t", {"a": 1.0, "b": 4.0, "c": math.nan}, "GiB", "a note"))
    styles = [attrs["style"] for attrs in told.all("i")]
    assert styles == ["width:25.00%", "width:100.00%"]
    for part in ("1 GiB", "4 GiB", "not measured", "a note"):
        assert part in told.text
    assert bars("t", {}, "GiB") == ""
    # Speeds read as in the table beside them.
    assert "1,340 tokens/s" in parse(bars("t", {"a": 1340.4, "b": 0.5}, "tokens/s")).text


def test_parts_of_a_bar_have_their_own_colours(parse: Parse) -> None:
    told = parse(length({"weights": 1.0, "none": 0.0, "<cache>": 3.0}, 8.0, {"weights": 0, "<cache>": 5}))
    assert [(i["class"], i["style"], i["title"]) for i in told.all("i")] == [
        ("shade-0", "width:12.50%", "weights"),
        ("shade-5", "width:37.50%", "<cache>"),
    ]
