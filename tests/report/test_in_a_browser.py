"""Pages in a real headless Chromium: drawn, read by pointer and keyboard, fit for a phone; no text of a run is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records
from chromium import Browser

from trimtab.report.charts import Chart, Line, Mark, bars, figure
from trimtab.report.fit import fit_page
from trimtab.report.frame import page, section, table
from trimtab.report.make import make_report
from trimtab.report.rehearsal import rehearsal_page

HOSTILE = [
    "</script ><img src=x onerror=window.hit=1><script>window.hit=1</script>",
    "\"'><svg onload=window.hit=1> ]]> --> <!-- <script>",
    "{{hit}} ${window.hit=1} &lt;b&gt; \u2028\u2029 \\u003c/script>",
    "\u202egnp.txt\u202c \u200f \u2066x\u2069 🚢🏴‍☠️ 漢字 \x00\x1b[31m \ud83d",
    "long" * 2500,
]
NARROW, WIDE = 360, 1100
LOSS = [3.0, 2.5, 2.25, 2.0, 1.9, 1.85, 1.8, 1.75, 1.7, 1.65, 1.6]
Wrote = Callable[[str], Path]


@pytest.fixture
def wrote(tmp_path: Path) -> Wrote:
    def write(text: str) -> Path:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def curve(browser: Browser, wrote: Wrote) -> Browser:
    """A page with one chart of two lines, opened."""
    lines = [
        Line("train", [(float(n), y) for n, y in enumerate(LOSS)]),
        Line("held out", [(0.0, 3.5), (10.0, 2.5)]),
    ]
    browser.open(wrote(page("t", [section("S", [figure(Chart("Loss", "step", "nats", lines))])])))
    return browser


def spoken(browser: Browser) -> str:
    return str(browser.js("document.querySelector('.spoken').textContent"))


def tip(browser: Browser) -> str | None:
    """What the box beside the cursor says, if it is there."""
    text: str | None = browser.js(
        "(t => t && !t.hidden ? t.innerText : null)(document.querySelector('.tip'))"
    )
    return text


def plot(browser: Browser) -> dict[str, float]:
    """Where the drawing itself lies in the window."""
    browser.js("document.querySelector('.plot').scrollIntoView({block: 'center'})")
    box: dict[str, float] = browser.js(
        "(b => ({x: b.x, y: b.y, width: b.width, height: b.height}))"
        "(document.querySelector('.u-over').getBoundingClientRect())"
    )
    return box


def zoomed(browser: Browser) -> bool:
    return not browser.js("[...document.querySelectorAll('.tools button')].pop().hidden")


def hostile_run(run: Path) -> Path:
    """The run with hostile texts wherever a page shows one."""
    first, second, third, fourth, long = HOSTILE
    (run / "config.yaml").write_text(
        json.dumps({"recipe": "grpo", "model": {"name": first}, "method": second, "note": long}),
        encoding="utf-8",
    )
    plan = json.loads((run / "plan.json").read_text())
    plan["device_map"] = {f"{text}.{n}": "cuda:0" for text in HOSTILE for n in range(3)} | {first: second}
    plan["reasons"] = {text: text for text in HOSTILE}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "data.json").write_text(
        json.dumps({"source": first, "dropped": {third: 3}, "first_dropped": {third: fourth}})
    )
    sample = {"prompt": first, "completion": fourth, "rewards": {second: 1.0}, "advantage": 0.5}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in (31, 32):
            figures: dict[str, Any] = {text: float(step) for text in HOSTILE}
            figures |= {f"rewards/{text}/mean": 0.5 for text in HOSTILE}
            figures |= {f"memory_bytes/{text}": 2**30 for text in HOSTILE}
            said = {"samples": [sample, {**sample, "prompt": long}]}
            for phase, values in (("train", figures), ("completions", said), ("warning", {"message": third})):
                file.write(json.dumps({"step": step, "time": 1.0, "phase": phase, **values}) + "\n")
    return run


def hostile_rehearsal() -> dict[str, Any]:
    """The record of a rehearsal with hostile names of tensors, modules, files, devices, kinds, phases and lines."""
    told = records.rehearsal()
    first, second, third, fourth, long = HOSTILE
    where = {"file": first, "line": 24, "code": second}
    finding = told["findings"][0]
    tensors = [
        {"name": text, "device": text, "dtype": text, "shape": [text], "born": where} for text in HOSTILE
    ]
    told["findings"] = [
        {
            **finding,
            "message": text,
            "fix": text,
            "module": text,
            "where": where,
            "cause": {**where, "why": text},
        }
        for text in HOSTILE
    ]
    told["findings"][0]["tensors"] = tensors
    told["sources"] = {first: {str(n): HOSTILE[n % 5] for n in range(20, 29)}}
    told["placement"] = {f"{text}.{n}": [HOSTILE[n]] for text in HOSTILE for n in range(3)}
    memory = told["memory"]["cuda:0"]
    memory["timeline"]["marks"] = [{"at": 7 * n, "name": text} for n, text in enumerate(HOSTILE)]
    memory["timeline"]["phase"] = first
    memory["timeline"]["kinds"].update({text: [2**30] * 400 for text in HOSTILE})
    memory["at_peak"].update({"op": long, "module": first, "where": where, "phase": third})
    memory["phases"][0].update({"name": second, "module": fourth})
    told["memory"] = {first: memory, long: records.device_memory(0.5)}
    told["collectives"] = records.collectives()
    told["collectives"][0]["calls"][0].update({"op": first, "group": fourth, "dtype": second, "where": where})
    told["asked"] = [{"how": "decision", "op": first, "where": where, "inside": None}]
    return {**told, "target": first, "notes": HOSTILE}


def hostile_fit() -> dict[str, Any]:
    told = records.fit()
    for option, text in zip(told["options"], HOSTILE * 2, strict=False):
        option.update({"gpu": text, "strategy": text, "quantize": text})
        option["kinds"][text] = 2**30
    texts = {text: text for text in HOSTILE}
    return {**told, "model": HOSTILE[0], "config": "\n".join(HOSTILE), "not_executed": texts}


@pytest.mark.parametrize("kind", ["run", "rehearsal", "fit"])
def test_no_text_of_a_run_is_run(browser: Browser, wrote: Wrote, grpo_run: Path, kind: str) -> None:
    match kind:
        case "run":
            text = make_report(hostile_run(grpo_run)).page
        case "rehearsal":
            text = rehearsal_page(hostile_rehearsal())
        case _:
            text = fit_page(hostile_fit())
    browser.open(wrote(text), width=NARROW)
    browser.js("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.settle()
    # Whatever a reader may do: every box beside a cursor, every name that hides a line.
    browser.js(
        "document.querySelectorAll('.plot').forEach(one => one.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'End'})))"
    )
    browser.js("document.querySelectorAll('.legend button').forEach(one => one.click())")
    browser.settle()
    assert browser.js("window.hit === undefined")
    assert browser.js("document.querySelectorAll('figure.chart canvas').length") > 0
    assert browser.js("document.querySelectorAll('body img, body svg, body iframe').length") == 0
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.js("document.documentElement.scrollWidth") <= NARROW
    assert HOSTILE[0] in browser.js("document.body.innerText")


def test_a_page_may_run_its_own_scripts_alone(curve: Browser) -> None:
    """Were a text ever taken for markup, the page's policy would still hold it back."""
    curve.js(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hit=1><b onclick=hit=1>b</b>');"
        "(s => { s.textContent = 'window.hit = 1'; document.body.append(s) })(document.createElement('script'));"
        "document.querySelector('b[onclick]').click()"
    )
    curve.settle()
    assert curve.js("window.hit === undefined")
    assert curve.js("fetch('https://example.org').then(() => 'went out', () => 'held back')") == "held back"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "rehearsal", "fit"])
def test_pages_fit_the_screen_and_are_readable(
    browser: Browser, wrote: Wrote, grpo_run: Path, kind: str, dark: bool
) -> None:
    made = {
        "run": lambda: make_report(grpo_run).page,
        "rehearsal": lambda: rehearsal_page(records.rehearsal()),
        "fit": lambda: fit_page(records.fit()),
    }
    file = wrote(made[kind]())
    for width in (NARROW, WIDE):
        browser.open(file, width=width, dark=dark)
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert browser.js(CONTRAST) == []
        assert browser.js(NOT_DRAWN) == 0
        assert browser.complaints() == []


CONTRAST = """(() => {
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const over = (top, below, alpha) => top.slice(0, 3).map((v, n) => alpha * v + (1 - alpha) * below[n]);
  const back = parts(getComputedStyle(document.body).backgroundColor);
  const poor = [];
  for (const one of document.querySelectorAll('body *')) {
    const words = [...one.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    if (!words.length || !one.checkVisibility() || one.closest('script, noscript')) continue;
    let [alpha, behind] = [1, back];
    for (let up = one; up !== document.body; up = up.parentElement) {
      alpha *= Number(getComputedStyle(up).opacity);
      const fill = parts(getComputedStyle(up).backgroundColor);
      if (behind === back && fill.length === 4 && fill[3]) behind = over(fill, back, fill[3]);
    }
    const ink = parts(getComputedStyle(one).color);
    const [a, b] = [light(over(ink, behind, alpha * (ink[3] ?? 1))), light(behind)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([one.className, words[0].data.trim(), (a + 0.05) / (b + 0.05)]);
  }
  return poor;
})()"""
"""Texts that stand out from what is behind them by less than 4.5 to 1."""

NOT_DRAWN = """[...document.querySelectorAll('.plot')].filter(one => one.checkVisibility()).filter(one => {
  const sheet = one.querySelector('canvas');
  return !sheet || !sheet.getContext('2d').getImageData(0, 0, sheet.width, sheet.height).data.some(v => v);
}).length"""
"""Charts on which nothing is drawn."""


def test_the_pointer_reads_all_lines(curve: Browser) -> None:
    box = plot(curve)
    assert tip(curve) is None
    curve.point(box["x"] + 0.31 * box["width"], box["y"] + 40)
    assert (tip(curve) or "").split("\n") == ["step 3", "train", "2 nats", "held out", "–"]
    curve.point(box["x"] + box["width"] - 2, box["y"] + 40)
    assert "held out\n2.5 nats" in (tip(curve) or "")
    sides = curve.js(
        "(b => [b.left, b.right, innerWidth])(document.querySelector('.tip').getBoundingClientRect())"
    )
    assert 0 <= sides[0] < sides[1] <= sides[2]
    curve.point(5, 5)
    assert tip(curve) is None


def test_no_name_is_cut_and_the_frame_of_the_focus_crosses_no_word(browser: Browser, wrote: Wrote) -> None:
    lines = [Line("a name that is longer than " * 3 + str(n), [(1.0, 2.0), (2.0, 3.0)]) for n in range(2)]
    browser.open(
        wrote(page("t", [figure(Chart("Speed", "step", "tokens/s (an estimate)", lines))])), width=NARROW
    )
    browser.js("document.querySelector('.plot').focus()")
    browser.press("End")
    assert lines[1].name[:70] in (tip(browser) or "")
    cut = "[...document.querySelectorAll('.legend span, .tip *')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.js(cut) == 0
    near = (
        "(([a, b, c]) => [a.bottom, b.top, b.bottom, c.top])(['.legend', '.plot', '.below']"
        ".map(name => document.querySelector(name).getBoundingClientRect()))"
    )
    above, top, bottom, below = browser.js(near)
    assert above + 2 <= top
    assert bottom + 2 <= below


def test_the_box_of_a_dot_does_not_cover_it(browser: Browser, wrote: Wrote) -> None:
    points = [(float(x), float(y)) for x in range(1, 10) for y in (1, 9)]
    names = ["a layout whose name is not short"] * len(points)
    dots = Chart("Speed", "GiB", "tokens/s (an estimate)", [Line("fits", points, names=names)], kind="dots")
    browser.open(wrote(page("t", [figure(dots)])), width=NARROW)
    browser.js("document.querySelector('.plot').focus()")
    # The axis goes from 0 to 1.12 times the highest dot; the cursor stands on the dot that is told.
    covered = (
        "(value => { const [o, t, c] = ['.u-over', '.tip', '.u-cursor-x'].map(name =>"
        " document.querySelector(name).getBoundingClientRect());"
        "const y = o.top + o.height * (1 - value / 10.08);"
        "return c.right > t.left && c.right < t.right && y > t.top && y < t.bottom })"
    )
    for _, value in points:
        browser.press("ArrowRight")
        assert not browser.js(f"{covered}({value})")


def test_on_a_phone_the_box_stands_under_the_chart_and_what_follows_stays_where_it_is(
    browser: Browser, wrote: Wrote
) -> None:
    lines = [Line(f"line {n}", [(float(x), x + n) for x in range(9)]) for n in range(6)]
    browser.open(
        wrote(page("t", [section("S", [figure(Chart("Loss", "step", "nats", lines))])])), width=NARROW
    )
    places = (
        "['.u-over', '.u-axis', '.tip', '.below'].map(name => document.querySelector(name).getBoundingClientRect())"
        ".map(box => [box.top, box.bottom])"
    )
    box = plot(browser)
    before = browser.js(places)
    browser.point(box["x"] + 0.5 * box["width"], box["y"] + 40)
    assert "line 5\n9 nats" in (tip(browser) or "")
    drawn, axis, told, below = browser.js(places)
    assert told[0] >= max(drawn[1], axis[1])
    assert told[1] <= below[0]
    assert (drawn, axis) == (before[0], before[1])
    browser.point(5, 5)
    assert tip(browser) is None
    assert browser.js(places)[3] == below
    browser.size(WIDE, 900)
    browser.settle()
    box = plot(browser)
    browser.point(box["x"] + 0.5 * box["width"], box["y"] + 40)
    drawn, _, told, _ = browser.js(places)
    assert drawn[0] < told[0] < drawn[1]


def test_a_long_name_leaves_room_for_what_it_names(browser: Browser, wrote: Wrote) -> None:
    told = {
        **records.fit(),
        "not_executed": {f"{n} × T4, a layout of many words": "why " * 40 for n in range(9)},
    }
    for width in (NARROW, WIDE):
        browser.open(wrote(fit_page(told)), width=width)
        narrowest = "Math.min(...[...document.querySelectorAll('dd')].map(one => one.clientWidth))"
        assert browser.js(narrowest) > width / 3


def test_names_in_tables_and_bars_are_whole_on_a_phone(browser: Browser, wrote: Wrote) -> None:
    long = "a_name_without_a_gap_" * 12
    parts = [
        bars("Peak", {"inference (1.00 times)": 1.0, long[:80]: 2.0}, "GiB"),
        table(["model", "n"], [[long, 1]]),
    ]
    for width in (NARROW, WIDE):
        browser.open(wrote(page("t", [section("S", parts)])), width=width)
        hidden = (
            "[...document.querySelectorAll('th, td')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert browser.js(hidden) == 0
        assert browser.js("document.querySelector('section').scrollWidth") <= width
        # What stands beside a long name is in sight.
        assert browser.js("document.querySelector('.scroll').scrollWidth") <= max(width, 400)


def test_line_numbers_stay_clear_of_the_mark_beside_them(browser: Browser, wrote: Wrote) -> None:
    told = records.rehearsal()
    where = {"file": "long.py", "line": 12345, "code": "x"}
    told["sources"] = {"long.py": {str(n): f"x = {n}" for n in range(12340, 12350)}}
    told["findings"][0].update({"where": where, "cause": None})
    for width in (NARROW, WIDE):
        browser.open(wrote(rehearsal_page(told)), width=width)
        room = (
            "(row => { const r = document.createRange(); r.selectNodeContents(row.querySelector('i'));"
            "const [text, all] = [r.getBoundingClientRect(), row.getBoundingClientRect()];"
            "return [text.left - all.left, text.height] })(document.querySelector('.here'))"
        )
        left, height = browser.js(room)
        assert left >= 5  # the mark is 4 pixels wide
        assert height < 25  # one line


def test_what_scrolls_inside_shades_the_edge_beyond_which_it_goes_on(
    browser: Browser, wrote: Wrote, tmp_path: Path
) -> None:
    from PIL import Image

    told = records.rehearsal()
    told["sources"] = {"a.py": {"1": "x = 1", "2": "y = " + "long_name_" * 30, "3": "z = 3"}}
    told["findings"][0].update({"where": {"file": "a.py", "line": 1, "code": "x"}, "cause": None})
    browser.open(wrote(rehearsal_page(told)), width=NARROW)
    box = browser.js(
        "(e => { e.scrollIntoView({block: 'center'}); e.scrollLeft = 0; const b = e.getBoundingClientRect();"
        "return [b.left, b.right, b.bottom] })(document.querySelector('.lines'))"
    )

    def darkest(x: float) -> int:
        """Near an edge, in the last line, which is short."""
        browser.settle()
        browser.picture(tmp_path / "seen.png", whole=False)
        with Image.open(tmp_path / "seen.png") as seen:
            return min(seen.convert("L").getpixel((int(x), int(box[2]) - n)) for n in (5, 6, 7))  # type: ignore

    assert darkest(box[1] - 3) < 240  # more to the right
    assert darkest(box[0] + 3) == 255
    browser.js("document.querySelector('.lines').scrollLeft = 1e5")
    assert darkest(box[1] - 3) == 255
    assert darkest(box[0] + 3) < 240


def test_dragging_zooms_and_a_double_click_shows_all(curve: Browser) -> None:
    box = plot(curve)
    middle = box["y"] + box["height"] / 2
    assert not zoomed(curve)
    curve.drag((box["x"] + 0.2 * box["width"], middle), (box["x"] + 0.61 * box["width"], middle))
    assert zoomed(curve)
    curve.point(box["x"] + 1, middle)
    assert (tip(curve) or "").startswith("step 2\n")
    curve.point(box["x"] + box["width"] - 1, middle)
    assert (tip(curve) or "").startswith("step 6\n")
    curve.click(box["x"] + 50, middle, times=2)
    assert not zoomed(curve)


def test_the_keyboard_goes_from_point_to_point_and_tells_each(curve: Browser) -> None:
    # By Tab, as a reader comes to it: past the two names and the two buttons.
    curve.press(*["Tab"] * 5)
    assert curve.js("document.activeElement.className") == "plot"
    curve.press("ArrowRight")
    assert spoken(curve) == "step 0: train 3, held out 3.5 nats"
    curve.press("ArrowRight", "ArrowRight")
    assert spoken(curve) == "step 2: train 2.25, held out – nats"
    assert (tip(curve) or "").startswith("step 2\n")
    curve.press("ArrowLeft")
    assert spoken(curve).startswith("step 1:")
    curve.press("End", "ArrowRight")
    assert spoken(curve).startswith("step 10: train 1.6")
    curve.press("Home", "ArrowLeft")
    assert spoken(curve).startswith("step 0:")
    curve.press("Escape")
    assert tip(curve) is None


def test_the_keyboard_zooms_and_what_is_shown_follows_the_cursor(curve: Browser) -> None:
    curve.js("document.querySelector('.plot').focus()")
    curve.press("Home", "+", "+")
    assert zoomed(curve)
    assert spoken(curve) == "step from 0 to 2.5"
    curve.press(*["ArrowRight"] * 7)
    assert spoken(curve).startswith("step 7:")
    cursor = curve.js("document.querySelector('.u-cursor-x').getBoundingClientRect().right")
    box = plot(curve)
    assert box["x"] <= cursor <= box["x"] + box["width"]
    curve.press("-", "-")
    assert not zoomed(curve)
    curve.press("+", "0")
    assert not zoomed(curve)
    curve.press("+", "Escape")
    assert not zoomed(curve)


def test_buttons_do_the_same_and_a_name_hides_its_line(curve: Browser) -> None:
    curve.press("Tab")
    curve.press("Enter")
    assert curve.js("document.activeElement.getAttribute('aria-pressed')") == "false"
    curve.js("document.querySelector('.plot').focus()")
    curve.press("Home")
    assert spoken(curve) == "step 0: held out 3.5 nats"
    curve.js("document.querySelector('.tools button').click()")
    assert zoomed(curve)
    curve.js("[...document.querySelectorAll('.tools button')].pop().click()")
    assert not zoomed(curve)


def test_a_stack_tells_its_sum_and_dots_their_names(browser: Browser, wrote: Wrote) -> None:
    areas = [
        Line(kind, [(float(n), float(n + k)) for n in range(5)])
        for k, kind in enumerate(("weights", "cache"))
    ]
    stack = Chart(
        "Memory", "place", "GiB", areas, kind="stack", marks=[Mark(0, "forward"), Mark(3, "backward")]
    )
    dots = Chart("Speed", "GiB", "tokens/s", [Line("fits", [(8, 3), (8, 4)], names=["a", "b"])], kind="dots")
    browser.open(wrote(page("t", [figure(stack), figure(dots)])))
    browser.js("document.querySelector('.plot').focus()")
    browser.press("End")
    assert spoken(browser) == "place 4, backward: all 9, cache 5, weights 4 GiB"
    browser.js("document.querySelectorAll('.legend button')[1].click()")
    browser.js("document.querySelector('.plot').focus()")
    browser.press("Home", "ArrowRight")
    assert spoken(browser) == "place 1, forward: all 1, weights 1 GiB"
    browser.js("document.querySelectorAll('.plot')[1].focus()")
    browser.press("Home")
    said = "document.querySelectorAll('.spoken')[1].textContent"
    assert browser.js(said) == "a: fits 3 tokens/s"
    browser.press("ArrowRight")  # another dot at the same place
    assert browser.js(said) == "b: fits 4 tokens/s"


def test_values_that_no_scale_was_made_for_are_drawn(browser: Browser, wrote: Wrote) -> None:
    odd: list[list[float]] = [
        [93447245.27622993, 93447245.27622995],
        [-1e299, 1e299],
        [5e-324, 1e-323],
        [0.0, 0.0],
        [7.0],
        [float("nan"), 1.0, float("inf")],
        [1e-12, 2e-12],
    ]
    drawn = [
        figure(Chart(f"c{n}", "step", "", [Line("a", [(float(x), y) for x, y in enumerate(values)])]))
        for n, values in enumerate(odd)
    ]
    browser.open(wrote(page("t", drawn)))
    assert browser.js("document.querySelectorAll('.plot canvas').length") == len(odd)
    assert browser.js(NOT_DRAWN) == 0
    assert browser.complaints() == []


def test_colours_follow_the_reader_at_once(curve: Browser) -> None:
    painted = (
        "((c, wanted) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
        "for (let i = 0; i < d.length; i += 4) if (wanted.every((v, k) => d[i + k] === v)) n++; return n })"
        "(document.querySelector('.plot canvas'), {})"
    )
    light, dark = "[11, 98, 164, 255]", "[95, 176, 240, 255]"
    assert (curve.js(painted.replace("{}", light)) > 100, curve.js(painted.replace("{}", dark))) == (True, 0)
    curve.dark(True)
    curve.settle()
    assert (curve.js(painted.replace("{}", light)), curve.js(painted.replace("{}", dark)) > 100) == (0, True)
    assert curve.js("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"


def test_without_scripts_the_values_stand_below(browser: Browser, wrote: Wrote, grpo_run: Path) -> None:
    browser.open(wrote(make_report(grpo_run).page), scripts=False)
    shown = browser.js("document.querySelector('figure.chart').innerText")
    assert "its values stand below" in shown
    assert "Values in reward" in shown
    assert browser.js("document.querySelector('figure.chart td').textContent") == "1"


def test_paper_gets_the_light_colours(curve: Browser) -> None:
    curve.dark(True)
    curve.js(
        "window.seen = ''; addEventListener('beforeprint', () => { window.seen = document.documentElement.className })"
    )
    printed = curve.call("Page.printToPDF", printBackground=True)
    assert len(printed["data"]) > 5000
    assert curve.js("window.seen") == "paper"
    assert curve.js("document.documentElement.className") == ""
