"""What would save memory where a rehearsal ran out of it: each change is rehearsed, in shapes, before it is told.

A Trimtab config is changed by its own settings, any other program by `what_if`. Nothing is told that was not seen: not
what a change saves, not that the program then fits.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.config import load_request
from trimtab.config.flags import as_words
from trimtab.config.schema import Config
from trimtab.diagnose.finding import Finding, Saving
from trimtab.diagnose.source import is_user_file
from trimtab.errors import RequestError
from trimtab.hardware.catalogue import find_gpu
from trimtab.rehearse import what_if
from trimtab.rehearse.batch_numbers import Fewer, fewer_rows, program_files
from trimtab.rehearse.fixes import nothing_printed
from trimtab.rehearse.launch_lines import is_config
from trimtab.rehearse.run import rehearse
from trimtab.rehearse.session import Settings
from trimtab.rehearse.shortage import FIXES, need
from trimtab.rehearse.verdict import Result

_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
"""NAME=VALUE before what is run."""

_LEAST = 100
"""A change that saves less than this part of what is needed is not told: layers that were checkpointed before."""


@dataclass(frozen=True)
class Change:
    """One thing to do otherwise."""

    words: str
    settings: tuple[str, ...] = ()
    """For a config."""
    what_if: tuple[str, ...] = ()
    """For another program."""
    how: str = ""
    """What to write in it."""
    fewer: Fewer | None = None
    """The program itself with other numbers in it."""

    def and_(self, other: Change) -> Change:
        return Change(
            f"{self.words} and {other.words}",
            self.settings + other.settings,
            self.what_if + other.what_if,
            "; ".join(filter(None, (self.how, other.how))),
            other.fewer or self.fewer,
        )


Again = Callable[[Change, float], Result | None]
"""Rehearses the program with a change, within so many seconds; None where the change cannot be made."""


def again_with(words: list[str], settings: Settings, **options: Any) -> Again:
    """The same rehearsal with a change, in shapes and without the program's output."""

    def again(change: Change, seconds: float) -> Result | None:
        changed = replace(settings, shapes_only=True, what_if=[*settings.what_if, *change.what_if])
        line = words
        if change.fewer is not None:
            line, changed.instead = change.fewer.words, {**settings.instead, **change.fewer.texts}
        try:
            with nothing_printed():
                return rehearse([*line, *change.settings], changed, timeout=seconds, **options)
        except RequestError:
            return None  # the config does not go with it

    return again


def changes_for(words: list[str], gpus: int, result: Result) -> list[Change]:
    """What can be done where the memory ended, the mildest first: what is computed stays the same as far as it can."""
    phase = phase_of(result)
    at = next((place for place, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
    if at < len(words) and is_config(Path(words[at])):
        return _of_config(load_request(Path(words[at]), as_words(words[at + 1 :])).config, gpus)
    checkpoint = "model.gradient_checkpointing_enable(), or torch.utils.checkpoint around its layers"
    if phase == "resume":
        return [
            Change(
                "a checkpoint that is loaded to the host", what_if=(what_if.LOADED_ON_HOST,), how=FIXES[phase]
            )
        ]
    if phase == "save":
        return [
            Change(
                "a state that is gathered on the host", what_if=(what_if.GATHERED_ON_HOST,), how=FIXES[phase]
            )
        ]
    return [
        *_of_optimizer(result),
        Change("gradient checkpointing", what_if=(what_if.CHECKPOINTING,), how=checkpoint),
        *_fewer_rows(words, result),
    ]


def _of_optimizer(result: Result) -> Iterable[Change]:
    """Where a step on lists of all tensors (`foreach`) takes the most, one that goes through them one by one."""
    finding = _short_of_memory(result)
    lack = finding.lack if finding is not None else None
    peak = result.memory.get(lack.device, {}).get("at_peak", {}) if lack is not None else {}
    if "_foreach_" in str(peak.get("op", "")):
        how = "fused=True where the optimizer is made, or foreach=False for one that has no such kernel"
        yield Change(
            "an optimizer that goes through its tensors one by one", what_if=(what_if.ONE_BY_ONE,), how=how
        )


def search_for(words: list[str], settings: Settings) -> str:
    """The line that looks for settings of a config that fit on these GPUs; empty for another program."""
    at = next((place for place, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
    if at == len(words) or not is_config(Path(words[at])):
        return ""
    count = f"{settings.gpus}x" * (settings.gpus > 1)
    return shlex.join(["trimtab", "fit", *words[at:], "--gpu", f"{count}{find_gpu(settings.gpu_name).key}"])


def _fewer_rows(words: list[str], result: Result) -> Iterable[Change]:
    """Of what DataLoaders put together; where there is none, by the numbers that the program itself has for it."""
    finding = _short_of_memory(result)
    where = [finding.where.file] if finding is not None and finding.where is not None else []
    for name, divisor in (("half as many rows in a batch", 2), ("a quarter of the rows in a batch", 4)):
        if result.batches_loaded:
            how = "a smaller batch_size, and as many more passes gathered into a step"
            yield Change(name, what_if=(f"{what_if.BATCH}{divisor}",), how=how)
            continue
        files = program_files(words, *filter(is_user_file, where))
        fewer = fewer_rows(words, files, divisor)
        if fewer is not None:
            yield Change(name, how=", ".join(fewer.changes), fewer=fewer)


def _of_config(config: Config, gpus: int) -> list[Change]:
    training, found = config.training, []
    if config.recipe != "zeroth_order" and not training.gradient_checkpointing:
        found.append(Change("gradient checkpointing", ("training.gradient_checkpointing=true",)))
    rows, gathered = training.batch_size, training.gradient_accumulation_steps
    for size in _smaller(rows):
        more = rows * gathered // size
        found.append(
            Change(
                f"{size} row{'s' * (size > 1)} at once and {more} passes a step",
                (f"training.batch_size={size}", f"training.gradient_accumulation_steps={more}"),
            )
        )
    if config.method == "lora" and config.lora.targets != "attention":
        found.append(Change("adapters on the attention alone", ("lora.targets=attention",)))
    if gpus > 1 and not config.sharding:
        found.append(Change(f"sharding over the {gpus} GPUs", ("sharding=true",)))
    if config.method == "lora" and config.model.quantize is None:
        found.append(Change("frozen weights in four bits", ("model.quantize=nf4",)))
    return found


def _smaller(rows: int) -> list[int]:
    """Half and a quarter of the rows of a batch; of an odd number the next smaller divisors."""
    sizes: list[int] = []
    for _ in range(2):
        rows = next((n for n in range(rows // 2, 0, -1) if rows % n == 0), 0)
        sizes += [rows] if rows else []
    return sizes


def try_savings(
    result: Result,
    changes: list[Change],
    again: Again,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
    *,
    search: str = "",
) -> None:
    """Rehearse the changes one by one within so many seconds, and put what they save into the finding.

    Where none is enough by itself, those that help are taken together, one after the other. `search` is the line that
    looks further; it is told where nothing was seen to fit.
    """
    finding = _short_of_memory(result)
    if finding is None or not result.ended:
        return
    # What is looked for takes several times as long as what was found.
    tell("out of memory: " + finding.message.partition("\n")[0])
    trials = _Trials(result, finding, again, time.monotonic() + seconds, tell)
    helpful: list[Change] = []
    for change in changes:
        if trials.made(change):
            helpful.append(change)
    if not any(saving.fits for saving in finding.savings):
        for change in _together(helpful):
            if trials.made(change) and finding.savings[-1].fits:
                break
    finding.savings.sort(key=lambda saving: (not saving.fits, saving.need_bytes if not saving.fits else 0))
    if finding.savings and finding.savings[0].fits and not (finding.lack and finding.lack.of_cause):
        first = finding.savings[0]
        finding.fix = f"{first.change}: {' '.join(first.settings) or first.how}. Rehearsed so, it fits."
    elif search and not (finding.savings and finding.savings[0].fits):
        finding.fix = f"{finding.fix}; what fits is looked for by: {search}"
    if trials.left_out:
        result.notes.append(
            f"not rehearsed to their end, for want of time: {', '.join(trials.left_out)} (--timeout gives more)"
        )


def _short_of_memory(result: Result) -> Finding | None:
    return next((one for one in result.findings if one.kind == "out-of-memory" and one.lack), None)


def phase_of(result: Result) -> str:
    """The phase in which the memory ended."""
    finding = _short_of_memory(result)
    return finding.lack.phase if finding is not None and finding.lack is not None else ""


def _together(helpful: Iterable[Change]) -> Iterable[Change]:
    """The changes added up; of several that set the same, the one that goes furthest."""
    whole: dict[frozenset[str], Change] = {}
    for change in helpful:
        whole[_touched(change)] = change
    sum_: Change | None = None
    for change in whole.values():
        sum_ = change if sum_ is None else sum_.and_(change)
        if sum_ is not change:
            yield sum_


def _touched(change: Change) -> frozenset[str]:
    """What a change sets, whatever it sets it to."""
    names = {part.partition("=")[0].rstrip("0123456789") for part in change.settings + change.what_if}
    return frozenset(names | ({what_if.BATCH} if change.fewer is not None else set()))


class _Trials:
    """Rehearses changes while there is time."""

    def __init__(
        self, result: Result, finding: Finding, again: Again, until: float, tell: Callable[[str], None]
    ) -> None:
        self._result, self._finding, self._again = result, finding, again
        self._until, self._tell = until, tell
        self._took = result.seconds
        self.left_out: list[str] = []

    def made(self, change: Change) -> bool:
        """Rehearse a change; whether it saves something, which is then told."""
        left = self._until - time.monotonic()
        if left < self._took:
            self.left_out.append(change.words)
            return False
        self._tell(f"rehearsing what would save memory: {change.words} …")
        trial = self._again(change, left)
        if trial is not None and not trial.ended and time.monotonic() >= self._until:
            self.left_out.append(change.words)  # it was begun, and its time was out
            return False
        if trial is None or not self._comparable(trial):
            return False
        self._took = max(trial.seconds, 1.0)
        before, after = (_fullest(one) for one in (self._result, trial))
        fits = not any(one.kind == "out-of-memory" for one in _flat(trial.findings))
        if not fits and before - after <= before // _LEAST:
            return False
        self._finding.savings.append(
            Saving(change.words, list(change.settings), after, max(0, before - after), fits, how=change.how)
        )
        return True

    def _comparable(self, trial: Result) -> bool:
        """Whether the changed program came as far, and stopped at nothing but the want of memory."""
        faults = {one.kind for one in _flat(trial.findings) if one.severity == "fault"}
        known = {one.kind for one in _flat(self._result.findings)}
        return trial.ended and trial.steps >= self._result.steps and faults <= known


def _fullest(result: Result) -> int:
    """What the fullest GPU needs; where tensors would fit in one piece and not as they come, with what lies between."""
    lacks = (
        one.lack for one in _flat(result.findings) if one.kind == "out-of-memory" and one.lack is not None
    )
    told = (need(told) for told in result.memory.values() if told["peak_bytes"])
    return max((*told, *(lack.need_bytes for lack in lacks)), default=0)


def _flat(findings: Iterable[Finding]) -> Iterable[Finding]:
    return (one for finding in findings for one in (finding, *finding.follows))
