"""Which optimizer `training.optimizer: auto` is, with the reason. It makes none, and imports no torch."""

from __future__ import annotations

from typing import NamedTuple

AUTO = "auto"


class Chosen(NamedTuple):
    """A name that transformers knows, and why it was taken."""

    name: str
    reason: str


def choose_optimizer(asked: str, kind: str) -> Chosen:
    """`kind` is that of the plan's device: cpu, cuda or mps."""
    if asked != AUTO:
        return Chosen(asked, "asked for")
    if kind == "cuda":
        return Chosen(
            "adamw_torch_fused", "one pass over the weights, and a bad step is kept out without a wait"
        )
    if kind == "cpu":
        return Chosen("adamw_torch_fused", "one pass over the weights")
    return Chosen("adamw_torch", f"torch's fused one is for CUDA and processors, and this is {kind}")
