"""The collector is held back while a process starts, and works as usual from the first step on."""

from __future__ import annotations

import subprocess
import sys

from trimtab.config.keys import bounds, schema_with_limits, settings

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
