"""What `trimtab fit` chooses from: layouts of a run that were executed, in order, as text and data. No search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trimtab.config.schema import Config
from trimtab.monitor.wording import duration
from trimtab.placement.plan import Strategy
from trimtab.recipes.roofline import assumptions
from trimtab.recipes.trial_step import Held

MARGIN = 0.05
"""Share of a GPU that is left free: what torch reserves and CUDA's own must fit into the rest."""
GIB = 2**30
NAMED = 4
"""Layouts that could not be executed for one reason, and are named with it; `--json` has all."""
Kept = Literal["all", "half", "checkpointed"]
"""What is kept for the backward pass: everything, half of what a compiled layer keeps, or each layer's input alone."""
_KEEPING: tuple[Kept, ...] = ("checkpointed", "half", "all")
"""From the least that is kept to the most."""
_LAID = {
    "single": "whole",
    "data_parallel": "a copy on each",
    "sharded": "sharded (FSDP2)",
    "split": "layers split",
}
_SAVED = {"all": "", "half": ", half of the activations", "checkpointed": ", checkpointing"}


@dataclass(frozen=True)
class Way:
    """How a run is laid out, but for its micro-batch."""

    strategy: Strategy
    gpus: int
    kept: Kept
    quantize: str | None
    length: int

    @property
    def ranks(self) -> int:
        return 1 if self.strategy in ("single", "split") else self.gpus

    def words(self) -> str:
        return _LAID[self.strategy] + _SAVED[self.kept] + (f", {self.quantize}" if self.quantize else "")


@dataclass(frozen=True)
class Option:
    """One layout that was executed."""

    gpu: str
    way: Way
    micro_batch: int
    accumulation: int
    held: Held
    """Of the GPU that is fullest."""
    capacity: int
    step_seconds: float | None
    """An estimate (roofline.py); None where there are no figures for one."""
    tokens: int
    """That a step learns from: its rows at their full length, or what it generates."""
    at_once: int
    """Bytes of weights and of activations on all GPUs together."""
    config: Config = field(repr=False, compare=False)
    """The settings, for `train`."""

    @property
    def tokens_a_second(self) -> float | None:
        """By the same estimate."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def needed(self) -> int:
        return self.held.reserved + self.held.context

    @property
    def lasting(self) -> int:
        """What lies there in every pass, however many rows it has: weights and what an optimizer keeps of them."""
        kept = ("weights", "gradients", "optimizer")
        return self.held.context + sum(self.held.kinds.get(kind, 0) for kind in kept)

    def least(self, way: Way, size: int) -> float:
        """Bytes that another layout holds at least on its fullest GPU, by what this one does; 0 where nothing is said.

        Where more is kept for the backward pass, or more rows go through, it is no less. Of fewer rows it is at least
        half of their share: some copies are made of several rows alone. And what all GPUs of a split hold at the end of
        a forward pass, they hold however many they are.
        """
        if replace(way, kept=self.way.kept, gpus=self.way.gpus) != self.way:
            return 0.0
        if way.gpus != self.way.gpus:
            whole = way.strategy == "split" and way.kept == self.way.kept == "all"
            return self.at_once / way.gpus if whole and size >= self.micro_batch else 0.0
        if _KEEPING.index(way.kept) < _KEEPING.index(self.way.kept):
            return 0.0
        return self.held.peak * (1.0 if size >= self.micro_batch else size / self.micro_batch / 2)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity * (1 - MARGIN)

    @property
    def share(self) -> float:
        return self.needed / self.capacity

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            **asdict(self.way),
            "micro_batch": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "rows_a_step": self.micro_batch * self.accumulation * self.way.ranks,
            "fits": self.fits,
            "peak_bytes": self.held.peak,
            "reserved_bytes": self.held.reserved,
            "context_bytes": self.held.context,
            "needed_bytes": self.needed,
            "capacity_bytes": self.capacity,
            "kinds": dict(self.held.kinds),
            "tokens_a_step": self.tokens,
            "step_seconds_estimate": self.step_seconds,
            "tokens_a_second_estimate": self.tokens_a_second,
        }


@dataclass
class Found:
    """All that was executed, and what could not be."""

    options: list[Option] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Layouts that could not be executed, with the reason."""

    def in_order(self) -> list[Option]:
        """What fits first, and of it the fastest by the estimate."""
        return sorted(
            self.options,
            key=lambda o: (not o.fits, -round(o.tokens_a_second or 0.0, 1), o.way.gpus, -o.micro_batch),
        )

    def fits_on(self, gpu: str) -> bool:
        return any(option.fits and option.gpu == gpu for option in self.options)

    @property
    def best(self) -> Option | None:
        return next((option for option in self.in_order() if option.fits), None)

    def shown(self) -> list[Option]:
        """Of each layout the best micro-batch that fits; of a GPU on which nothing does, what comes nearest."""
        rows: dict[tuple[str, Way | None], Option] = {}
        for option in self.in_order():
            if option.fits:
                rows.setdefault((option.gpu, option.way), option)
        for option in sorted(self.options, key=lambda option: option.share):
            if not self.fits_on(option.gpu):
                rows.setdefault((option.gpu, None), option)
        return list(rows.values())

    def lines(self) -> list[str]:
        """A table for people."""
        head = (
            "",
            "GPUs",
            "layout",
            "rows × passes",
            "length",
            "peak",
            "reserved",
            "of the GPU",
            "step (est.)",
            "tokens/s (est.)",
        )
        table = [head, *(_cells(option) for option in self.shown())]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        # Words stand left, figures right.
        return [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]

    def footnotes(self) -> list[str]:
        """How the table is to be read, and what is not in it."""
        notes = [f"fits: what torch reserves and CUDA's own in {1 - MARGIN:.0%} of the GPU's memory"]
        if any(option.tokens_a_second is not None for option in self.options):
            notes += [
                "times are an estimate, nothing was measured:",
                *(f"  - {one}" for one in assumptions()),
            ]
        for why in dict.fromkeys(self.failed.values()):
            layouts = [layout for layout, reason in self.failed.items() if reason == why]
            more = [f"{len(layouts) - NAMED} more"] if len(layouts) > NAMED else []
            notes.append(f"! not executed: {'; '.join([*layouts[:NAMED], *more])}: {why}")
        return notes

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "margin": MARGIN,
            "options": [option.as_dict() for option in self.in_order()],
            "best": best.as_dict() if best is not None else None,
            "not_executed": self.failed,
            "estimate_assumes": assumptions(),
        }


def _cells(option: Option) -> tuple[str, ...]:
    speed = option.tokens_a_second
    return (
        "✓" if option.fits else "✗",
        f"{option.way.gpus} × {option.gpu}",
        option.way.words(),
        f"{option.micro_batch} × {option.accumulation}",
        f"{option.way.length:,}",
        f"{option.held.peak / GIB:.1f} GiB",
        f"{option.held.reserved / GIB:.1f} GiB",
        f"{option.share:.0%} of {option.capacity / GIB:.1f}",
        duration(option.step_seconds) if option.step_seconds is not None else "-",
        f"{speed:,.0f}" if speed is not None else "-",
    )
