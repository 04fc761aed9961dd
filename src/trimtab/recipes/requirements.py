"""What a run needs that can be told in a moment, before torch is imported: rank variables, optimizer, trackers.

Loads nothing: packages are looked for and not imported.
"""

from __future__ import annotations

from importlib.util import find_spec

from trimtab.config import Config
from trimtab.config.keys import has_effect
from trimtab.config.library_names import nearest, optimizer_names
from trimtab.errors import RequestError
from trimtab.hardware.launcher import detect_launcher
from trimtab.monitor.trackers import check_trackers

# How an optimizer's name begins, the package that has it, and what pip calls that; the first that fits counts.
_PACKAGES = (
    (("adamw_torch_xla",), "torch_xla", "torch_xla"),
    (("adamw_torch_npu",), "torch_npu", "torch_npu"),
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("adamw_anyprecision",), "torchdistx", "torchdistx"),
    (
        ("adamw_bnb", "adamw_8bit", "ademamix", "lion", "paged_", "rmsprop_bnb"),
        "bitsandbytes",
        "bitsandbytes",
    ),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_",), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
)
_BY_MODULES = ("galore_", "apollo_")
"""Optimizers for layers that are named to them one by one."""


def check_requirements(config: Config) -> None:
    """Raise RequestError for what this machine or its environment cannot give the run."""
    detect_launcher()
    if has_effect(config, "training.optimizer"):
        check_optimizer(config.training.optimizer)
    if has_effect(config, "monitor.report_to"):
        check_trackers(config.monitor.report_to)


def check_optimizer(name: str) -> None:
    """Raise RequestError for a name that transformers does not have, or whose package is not installed."""
    known = ["auto", *optimizer_names()]
    if name in known and (why := _out_of_reach(name)) is None:
        return
    usable = [other for other in known if _out_of_reach(other) is None]
    change = f"write one of {', '.join(usable)}"
    if name not in known:
        why = "transformers has no optimizer of this name"
        meant = nearest(name, usable)
        change = f"did you mean {meant}? Or {change}" if meant else change
    raise RequestError.of(f"training.optimizer: {name}", str(why), change)


def _out_of_reach(name: str) -> str | None:
    """Why an optimizer that transformers knows cannot be used here."""
    if name.startswith(_BY_MODULES):
        return "it must be told which layers it is for, and no setting here tells it"
    packages = ((module, package) for beginnings, module, package in _PACKAGES if name.startswith(beginnings))
    module, package = next(packages, ("torch", "torch"))
    return None if find_spec(module) else f"its package is not installed (`pip install {package}`)"
