"""Looks for settings under which a run fits on given GPUs, the fastest first. What fits is executed, speed estimated.

The rows of a step stay what they are: a smaller micro-batch is accumulated more often. In this order a run is made to
fit: fewer rows at once, less kept for the backward pass, a model that is sharded or split, four bits for frozen
weights, more GPUs, and shorter rows last of all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.gpu_models import GpuModel
from trimtab.hardware import Hardware
from trimtab.hardware.catalogue import Card
from trimtab.launches import Launch, Work
from trimtab.placement import PlacementPlan
from trimtab.placement.plan import Strategy
from trimtab.placement.sizing import PlacementError
from trimtab.recipes.fit_options import GIB, MARGIN, Found, Kept, Option, Way
from trimtab.recipes.planning import Known, resolve_for
from trimtab.recipes.roofline import Load, floor, gathering, seconds, step_seconds
from trimtab.recipes.table import recipe_of
from trimtab.recipes.trial_server import Answer
from trimtab.recipes.trial_step import Executed, Trial
from trimtab.recipes.trials import Trials, TrialsEnded

SHORTEST = 128
"""Rows are not made shorter than this."""
_ASKED = re.compile(r" \([^()]*\basked for\b[^()]*\)")
"""Who asked for a layout: of those that are tried here, nobody did."""
HALF = 0.5
"""`speed.activation_memory_budget` of the layouts that keep half."""
_AT_ONCE = ("weights", "activations")
"""What all GPUs of a split hold at the same time, when a forward pass is complete that computes nothing again."""
_FAR = 2
"""Times the room of a GPU: what needs so much of it is not made to fit by a little less."""


@dataclass(frozen=True)
class _Tried:
    """A layout with its plan, and what executing it took; None where it could not be."""

    config: Config
    plan: PlacementPlan
    executed: Executed | None


class Search:
    """One search. Each layout is executed at most once; GPUs for which the same is computed share it."""

    def __init__(
        self, config: Config, rows: int, machine: Hardware, trials: Trials, tell: Callable[[str], None]
    ) -> None:
        """`rows` are those of one step, `tell` hears what is being executed."""
        recipe = recipe_of(config)
        if recipe.fullest is None:
            raise RequestError.of(
                f"`trimtab fit` of recipe {config.recipe}",
                "what fits is executed, and a step of this recipe cannot be without its data",
                "use `trimtab plan --gpus`, which estimates it",
            )
        self._config, self._rows, self._machine, self._trials, self._tell = (
            config,
            rows,
            machine,
            trials,
            tell,
        )
        self._trains = recipe.workload(config, False).training
        self._rewarded = recipe.rewarded
        self._known: dict[str | None, Known] = {}
        self._answers: dict[str, Answer] = {}
        self._passes: dict[tuple[int, str | None], dict[int, tuple[Work, bool]]] = {}
        """By length of rows and format of weights: the kernels of a pass over so many of them, and whether it kept
        all of its activations."""
        self._at_once = max(1, os.cpu_count() or 1)
        self.found = Found()

    def on(self, card: Card, counts: Sequence[int], *, all_counts: bool = False) -> None:
        """Search on one kind of GPU, by growing numbers of them: to the first that fits, or through all counts."""
        longest = self._config.data.max_length
        # What a rewarded run has to answer with is no matter of memory alone.
        halvings = 1 if self._rewarded else longest.bit_length()
        lengths = [longest >> k for k in range(halvings) if k == 0 or longest >> k >= SHORTEST]
        for length in lengths:
            for count in counts if card.accelerator.kind == "cuda" else [1]:
                if self._with(card, count, length) and not all_counts:
                    return
            if self.found.fits_on(card.key):
                return

    def _with(self, card: Card, count: int, length: int) -> bool:
        """Whether something fits on so many GPUs: whole, sharded or split, then the same in four bits."""
        as_asked = self._config.model.quantize
        packs = as_asked is None and self._config.method == "lora" and self._trains
        four_bit = ["nf4"] if packs and card.accelerator.kind == "cuda" else []
        kept: tuple[Kept, ...] = ("all", "half", "checkpointed") if self._trains else ("all",)
        tiers: list[tuple[Strategy, ...]] = (
            [("single",)] if count == 1 else [("data_parallel", "sharded"), ("split",)]
        )
        for quantize in [as_asked, *four_bit]:
            for tier in tiers:
                if self._fastest(card, [Way(s, count, k, quantize, length) for s in tier for k in kept]):
                    return True
        return False

    def _fastest(self, card: Card, ways: Sequence[Way]) -> bool:
        """Execute what may be the fastest of these; a way that cannot beat what fits already is left out."""
        best: Option | None = None
        for way in ways:
            if self._rows % way.ranks:
                why = f"the {self._rows} rows of a step cannot be shared out evenly"
                self.found.failed[_laid_out(card, way)] = why
                continue
            sizes = [n for n in range(1, self._rows // way.ranks + 1) if self._rows // way.ranks % n == 0]
            if way.kept == "half" and not self._compiles(card, replace(way, kept="all"), sizes[0]):
                continue
            if best is not None and not self._may_beat(card, way, sizes[-1], best):
                continue
            if self._without_hope(card, way) or self._weighs_too_much(card, way, sizes[0]):
                continue
            if way.kept == "all" and self._far_too_much(card, way):
                # Where the least that can be kept is too much, nothing else is to be executed.
                self._execute(card, replace(way, kept="checkpointed"), sizes[:1])
            option = self._largest(card, way, sizes)
            if option is not None and (
                best is None or (option.tokens_a_second or 0) > (best.tokens_a_second or 0)
            ):
                best = option
        return best is not None

    def _weighs_too_much(self, card: Card, way: Way, size: int) -> bool:
        """Whether the weights alone are larger than the GPU: nothing has to be executed to know it, and it is told."""
        made = self._planned(card, way, size)
        shares = [share.weights for share in made[1].memory.values()] if made is not None else []
        # Which GPU of a split holds which layers is chosen: by no choice do all hold less than their mean.
        weights = sum(shares) // len(shares) if shares and way.strategy == "split" else max(shares, default=0)
        if weights <= card.accelerator.total_bytes:
            return False
        held = (
            f"weights alone take {weights / GIB:.1f} GiB on a GPU of {card.accelerator.total_bytes / GIB:.1f}"
        )
        self.found.failed[_laid_out(card, way)] = held
        return True

    def _compiles(self, card: Card, way: Way, size: int) -> bool:
        """Whether layers are compiled, which alone can keep a part of their activations."""
        made = self._planned(card, way, size)
        return made is not None and made[1].speed.compile

    def _may_beat(self, card: Card, way: Way, size: int, best: Option) -> bool:
        """Whether a way could be faster if all of its rows went through at once."""
        if best.tokens_a_second is None or card.model is None:
            return False
        made = self._planned(card, way, size)
        a_pass = self._fastest_pass(card.model, way, size)
        if made is None or a_pass is None:
            return False
        passes = self._rows // (size * way.ranks)
        sent = gathering(card.model, way.gpus, way.strategy, _weights(made[1]))
        # Where layers are split, all of them still work one after the other.
        return self._tokens(way) / (passes * max(sent, a_pass)) > best.tokens_a_second * 1.01

    def _fastest_pass(self, gpu: GpuModel, way: Way, size: int) -> float | None:
        """Seconds under which no pass over so many rows is, by those that were executed, whether they fit or not."""
        known = self._passes.get((way.length, way.quantize))
        if not known:
            return None
        rows = max((number for number in known if number <= size), default=min(known))
        work, all_kept = known[rows]
        least = floor(gpu, work, size / rows, _again(self._config, way))
        # Fewer rows take no longer, and neither does what computes nothing twice; sharing weights out only adds to it.
        return max(least, seconds(gpu, work)) if all_kept and rows <= size else least

    def _largest(self, card: Card, way: Way, sizes: Sequence[int]) -> Option | None:
        """The largest micro-batch that fits: all rows at once, or else about as many as there is room for by that."""
        fits, misses = -1, sum(not self._is_too_much(card, way, size) for size in sizes)
        near = misses - 1
        while misses - fits > 1:
            # The guess and the next one at once, which most often is one that fits beside one that does not.
            beside = min(near + 1, misses - 1) if near >= 0 and self._at_once > 1 else near
            near, beside = (min(max(place, fits + 1), misses - 1) for place in (near, beside))
            tried = self._execute(card, way, sorted({sizes[near], sizes[beside]}))
            if not tried:
                return None
            for option in tried:
                place = sizes.index(option.micro_batch)
                fits, misses = (max(fits, place), misses) if option.fits else (fits, min(misses, place))
            misses = min(misses, sum(not self._is_too_much(card, way, size) for size in sizes))
            if fits < 0 and self._without_hope(card, way):
                return None
            near = self._guess(card, way, sizes)
        known = (o for o in self._of(card, way) if fits >= 0 and o.micro_batch == sizes[fits])
        return next(known, None)

    def _room(self, card: Card) -> float:
        return card.accelerator.total_bytes * (1 - MARGIN)

    def _far_too_much(self, card: Card, way: Way) -> bool:
        """Whether all that was executed of its kind, on other numbers of GPUs or of other rows, is far too much."""
        alike = (card.key, way.strategy, way.quantize, way.kept)
        needed = [
            option.needed
            for option in self.found.options
            if (option.gpu, option.way.strategy, option.way.quantize, option.way.kept) == alike
        ]
        return way.kept == "all" and self._trains and min(needed, default=0) > _FAR * self._room(card)

    def _is_too_much(self, card: Card, way: Way, size: int) -> bool:
        """Whether so many rows cannot fit by what was executed: see `Option.least`."""
        room = self._room(card)
        return any(
            option.gpu == card.key and option.least(way, size) + option.held.context > room
            for option in self.found.options
        )

    def _of(self, card: Card, way: Way) -> list[Option]:
        return [option for option in self.found.options if (option.gpu, option.way) == (card.key, way)]

    def _guess(self, card: Card, way: Way, sizes: Sequence[int]) -> int:
        """The place of the largest size that fits by a line through what was executed; -1 where none does by it."""
        room = self._room(card)
        known = sorted((option.micro_batch, option.needed, option) for option in self._of(card, way))
        below = [one for one in known if one[2].fits][-1:]
        above = [one for one in known if not one[2].fits][:1]
        high, most, option = (above or below)[0]
        low, least = below[0][:2] if below else (0, option.lasting)
        each = max((most - least) / max(high - low, 1), 1.0)
        most_rows = low + (room - least) / each
        return max((place for place, size in enumerate(sizes) if size <= most_rows), default=-1)

    def _without_hope(self, card: Card, way: Way) -> bool:
        """Whether what lies on a GPU between two passes is too much, which fewer rows or shorter ones do not change."""
        room = self._room(card)
        alike = (way.strategy, way.gpus, way.quantize)
        return any(
            option.gpu == card.key
            and (option.way.strategy, option.way.gpus, option.way.quantize) == alike
            and option.lasting > room
            for option in self.found.options
        )

    def _execute(self, card: Card, way: Way, sizes: Sequence[int]) -> list[Option]:
        """Options of these micro-batches, executed at once; none where the layout cannot be had or executed."""
        made = {size: planned for size in sizes if (planned := self._planned(card, way, size)) is not None}
        asked: dict[int, str] = {}
        for size, (config, plan) in made.items():
            key = _key(config, plan, card)
            if key not in self._answers and key not in asked.values():
                self._tell(
                    f"{way.gpus} × {card.key}, {way.words()}, {size} row{'s' * (size > 1)} of {way.length:,}"
                )
                trial = Trial(config=config, plan=plan, gpus=card.several(way.gpus), counts=True)
                asked[self._trials.ask(trial)] = key
        waiting = dict(asked)
        try:
            while waiting:
                number, answer = self._trials.answer()
                self._answers[waiting.pop(number)] = answer
        except TrialsEnded as error:
            self._answers |= dict.fromkeys(waiting.values(), Answer(None, str(error)))
        options = [self._option(card, way, size, *planned) for size, planned in made.items()]
        found = [option for option in options if option is not None]
        self.found.options += [option for option in found if option not in self.found.options]
        return found

    def _option(self, card: Card, way: Way, size: int, config: Config, plan: PlacementPlan) -> Option | None:
        answer = self._answers[_key(config, plan, card)]
        executed = answer.executed
        if executed is None:
            self.found.failed[f"{way.gpus} × {card.key}, {way.words()}"] = answer.failed
            return None
        fullest = max(executed.memory.values(), key=lambda held: held.reserved)
        each = _a_pass(executed)
        passed = self._passes.setdefault((way.length, way.quantize), {})
        if way.kept == "all" or not any(all_kept for _, all_kept in passed.values()):
            passed[size] = each, way.kept == "all"
        passes = self._rows // (size * way.ranks)
        estimated = None
        if card.model is not None and each:
            load = Load(
                a_pass=each,
                a_step=_a_step(executed),
                passes=passes,
                weights=_weights(plan),
                trained=self._known[way.quantize].profile.trainable * 4,
            )
            estimated = step_seconds(card.model, way.gpus, way.strategy, load)
        return Option(
            card.key,
            way,
            size,
            passes,
            fullest,
            card.accelerator.total_bytes,
            estimated,
            self._tokens(way),
            sum(held.kinds.get(kind, 0) for held in executed.memory.values() for kind in _AT_ONCE),
            config,
        )

    def _tokens(self, way: Way) -> int:
        """Of a step: of a rewarded one those that it generates."""
        return self._rows * (self._config.grpo.max_completion_length if self._rewarded else way.length)

    def _planned(self, card: Card, way: Way, size: int) -> tuple[Config, PlacementPlan] | None:
        """The settings of a layout and their plan; None where such a plan cannot be, which is told."""
        config = self._as_config(card, way, size)
        if way.quantize not in self._known:
            self._known[way.quantize] = self._trials.know(config)
        kind = card.accelerator.kind
        gpus = card.several(way.gpus) if kind == "cuda" else (card.accelerator,)
        machine = replace(self._machine, accelerators=gpus)
        try:
            return config, resolve_for(config, machine, self._known[way.quantize], refuses=False)
        except PlacementError as error:
            told = str(error).partition("\n  change: ")[0].replace("\n  why: ", ": ")
            self.found.failed[f"{way.gpus} × {card.key}, {way.words()}"] = _ASKED.sub("", told)
            return None

    def _as_config(self, card: Card, way: Way, size: int) -> Config:
        config = self._config
        passes = self._rows // (size * way.ranks)
        # What was asked for, and is not against it, stays as it was written.
        no_split = False if config.model_parallel else config.model_parallel
        no_shards = False if config.sharding else config.sharding
        placed: dict[str, dict[str, Any]] = {
            "single": {"processes": 1, "model_parallel": no_split, "sharding": no_shards},
            "data_parallel": {"processes": way.gpus, "model_parallel": no_split, "sharding": False},
            "sharded": {"processes": way.gpus, "model_parallel": no_split, "sharding": True},
            "split": {"processes": None, "model_parallel": True, "sharding": no_shards},
        }
        kind = card.accelerator.kind
        device = config.device if config.device.partition(":")[0] in ("auto", kind) else kind
        training = {
            "batch_size": size,
            "gradient_accumulation_steps": passes,
            "gradient_checkpointing": way.kept == "checkpointed",
        }
        if config.training.effective_batch_size is not None:
            training["effective_batch_size"] = self._rows
        return config.model_copy(
            update={
                **placed[way.strategy],
                "device": device,
                "training": config.training.model_copy(update=training),
                "data": config.data.model_copy(update={"max_length": way.length}),
                "model": config.model.model_copy(update={"quantize": way.quantize}),
                "speed": config.speed.model_copy(
                    update={"activation_memory_budget": HALF if way.kept == "half" else None}
                ),
            }
        )


def _weights(plan: PlacementPlan) -> int:
    """Bytes of the weights that one GPU holds."""
    return max(share.weights for share in plan.memory.values())


def _a_pass(executed: Executed) -> Work:
    work = executed.work.get("pass", {})
    return {launch: number / executed.passes for launch, number in work.items()}


def _a_step(executed: Executed) -> Work:
    """What comes once a step."""
    found: Counter[Launch] = Counter()
    for section in ("update", "generate"):
        found.update(executed.work.get(section, {}))
    return found


def _again(config: Config, way: Way) -> float:
    """Which share of a pass is computed once more: a forward pass is a third where all is trained, else half."""
    forward = 1 / 3 if config.method == "full" else 1 / 2
    return {"all": 0.0, "half": 0.0, "checkpointed": forward}[way.kept]


def _laid_out(card: Card, way: Way) -> str:
    """A layout by what does not hang on how much is kept for the backward pass."""
    return f"{way.gpus} × {card.key}, {replace(way, kept='all').words()}"


def _key(config: Config, plan: PlacementPlan, card: Card) -> str:
    """What a trial hangs on: all but how much memory the GPUs have."""
    bare = replace(plan, memory={}, reasons={}, notes=())
    return f"{config.model_dump_json()} {bare} {card.accelerator.capability}"
