"""What `sft_speed.py` can measure: groups of cells that train one model on the same rows. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.bench.ladder import TITLES

TRIMTAB = "trimtab"
LADDER = ("hf", *TITLES)


@dataclass(frozen=True)
class Group:
    """Cells that train the same model on the same rows."""

    shape: str
    title: str
    length: int
    batch: int
    warm_up: int
    steps: int
    """Timed ones, after the warm-up."""
    rows: str = "full"
    checkpointing: bool = False
    cells: tuple[str, ...] = ("hf", "liger", "trl", "unsloth", TRIMTAB)
    more: tuple[str, ...] = ()
    """Cells that are only run when they are named."""
    quantize: str | None = None
    """How the frozen weights are held, where not in 16 bits."""


GROUPS = {
    "8B": Group(
        "8B", "Llama-3.1-8B shape, 2 × 4096", 4096, 2, 6, 10, more=("hf-compile", "unsloth-checkpoint")
    ),
    "1B": Group(
        "1B", "Llama-3.2-1B shape, 2 × 4096", 4096, 2, 10, 90, more=("hf-compile", "unsloth-checkpoint")
    ),
    "alpaca": Group(
        "1B", "1B shape, Alpaca, 16 rows", 2048, 16, 12, 50, "alpaca", cells=("hf", TRIMTAB), more=("trl",)
    ),
    "alpaca-8B": Group("8B", "8B shape, Alpaca, 16 rows", 2048, 16, 6, 14, "alpaca", cells=("hf", TRIMTAB)),
    "long": Group(
        "8B",
        "8B shape, 1 × 32,768, checkpointing",
        32768,
        1,
        1,
        2,
        checkpointing=True,
        cells=("hf", "liger", TRIMTAB),
    ),
    "4bit": Group(
        "8B",
        "8B shape in four bits (NF4), 2 × 4096, checkpointing",
        4096,
        2,
        4,
        6,
        checkpointing=True,
        cells=("qlora", TRIMTAB),
        more=("qlora-liger",),
        quantize="nf4",
    ),
    "ladder": Group("1B", "1B shape, 2 × 4096, one change a row", 4096, 2, 8, 12, cells=LADDER),
    "ladder-8B": Group("8B", "8B shape, 2 × 4096, one change a row", 4096, 2, 5, 6, cells=LADDER),
    "ladder-alpaca": Group(
        "1B", "1B shape, Alpaca, 16 rows, one change a row", 2048, 16, 12, 20, "alpaca", cells=LADDER
    ),
}
USUAL = ("8B", "1B", "alpaca")
"""What is run when nothing is named."""
