"""The collector is held back while a process starts, and works as usual from the first step on; calls have room."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimtab.config.keys import bounds, schema_with_limits, settings
from trimtab.start_up import roomy

HELD = """
import gc
from trimtab.start_up import collector_held, settle
usual = gc.get_threshold()
with collector_held():
    assert gc.get_threshold()[0] > 100 * usual[0]
    with collector_held():
        pass
    assert gc.get_threshold() != usual, "the inner one is no end"
    settle()
    assert gc.get_threshold() == usual and gc.get_freeze_count() > 1000
    frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    settle()
    assert gc.get_freeze_count() <= frozen, "what came after is collected when it is garbage"
assert gc.get_threshold() == usual
with collector_held():
    assert gc.get_threshold() == usual, "the work has begun"
"""
UNSETTLED = """
import gc
from trimtab.start_up import collector_held
usual = gc.get_threshold()
with collector_held():
    pass
assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
gc.disable()
with collector_held():
    assert gc.get_threshold() == usual, "who switched it off is left in peace"
"""


def test_the_collector_is_held_and_given_back() -> None:
    for program in (HELD, UNSETTLED):
        subprocess.run([sys.executable, "-c", program], check=True)


def test_bounds_are_those_of_the_whole_schema() -> None:
    whole = schema_with_limits()
    lora = whole["$defs"]["LoraSettings"]["properties"]["r"]
    assert {name: bounds("lora.r")[name] for name in ("maximum", "type")} == {
        "maximum": 2**16,
        "type": lora["type"],
    }
    assert all(bounds(key) == {} or {"type"} < bounds(key).keys() for key in settings())
    assert bounds("no.setting") == {}


def _called_at(depth: int, times: int) -> None:
    if depth:
        _called_at(depth - 1, times)
        return
    for _ in range(times):
        _nothing(1, 2)


def _nothing(one: int, other: int) -> int:
    return one + other


def test_calls_at_any_depth_ask_the_kernel_for_no_memory() -> None:
    resource = pytest.importorskip("resource")

    @roomy
    def deep(*, depths: range, times: int) -> int:
        _called_at(max(depths), 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for depth in depths:
            _called_at(depth, times)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    # Without room every end of a piece of frames is one of these depths, and each of its calls a page.
    assert deep(depths=range(200), times=500) < 500
