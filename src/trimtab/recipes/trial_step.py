"""Some training steps of a config, executed on virtual GPUs by shapes alone: what every GPU held at its fullest.

The parts are those of a run: the recipe's driver over the plan's model, with rows as long as the settings let them be
(fullest_rows.py). No weights and no data are read, nothing is kept, and of several processes rank 0 stands for all. It
changes the process that it is called in for good: trial_server.py calls it in one of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from trimtab.config.schema import Config
from trimtab.hardware import Accelerator
from trimtab.launches import Work
from trimtab.placement import PlacementPlan
from trimtab.recipes.fullest_rows import Fullest, NotExecuted

if TYPE_CHECKING:
    from trimtab.virtual.state import VirtualDevice
    from trimtab.virtual.work import Tally

STEPS = 2
"""The first makes the optimizer's state, the second has it beside its activations."""
LONGEST = "the data's {rows:,} longest rows"
_HELD_BY_NONE = (
    *("epochs", "learning_rate", "lr_scheduler", "warmup_ratio", "warmup_steps", "logging_steps"),
    *("eval_steps", "save_steps", "save_total_limit", "keep_best", "resume_changed"),
)
"""Settings of the training by which nothing on a GPU grows or shrinks,"""
_OF_THE_RUN = ("seed", "samples", "export", "overwrite", "output_dir")
"""and of the run."""
_ROOM = 1 << 50
"""Memory of each virtual GPU: no step fails for want of it, so that what is needed is known where it is too much."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is to be executed."""

    config: Config
    plan: PlacementPlan
    gpus: tuple[Accelerator, ...]
    """Those of the plan, whatever is in this machine."""
    counts: bool = False
    """Whether to count the kernels of the last step too."""
    snug: bool = False
    """Whether the GPUs have no more memory than they have: the allocator then gives back what it keeps in store before
    it is short, as on hardware, and a step that does not fit fails."""
    rows: tuple[Any, ...] = ()
    """Prepared rows to be taken in place of made up ones; a batch of the data's longest."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """One GPU at its fullest, in bytes."""

    peak: int
    """Of all tensors: `torch.cuda.max_memory_allocated`."""
    reserved: int
    """What torch's allocator took from the device for them: `torch.cuda.max_memory_reserved`."""
    context: int
    """What CUDA holds beside torch."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The peak by what it was made of."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What the steps took."""

    memory: Mapping[str, Held]
    rows: str
    """What was pushed through the model in one pass, in words."""
    passes: int = 1
    """How many of them a step had."""
    work: Mapping[str, Work] = field(default_factory=dict)
    """The kernels of one step, where they were asked for: of its passes (`pass`), and what comes once (`update`,
    `generate`)."""
    seconds: float = 0.0


def execute(trial: Trial) -> Executed:
    """Make the steps in this process, which is of no other use afterwards."""
    import torch

    from trimtab.hardware.launcher import RANK_VARIABLES
    from trimtab.models.load import make_built_in
    from trimtab.recipes.table import recipe_of
    from trimtab.rehearse import loading, one_rank
    from trimtab.virtual import kinds, processes
    from trimtab.virtual.context import install
    from trimtab.virtual.work import Tally

    began, config, apple = time.monotonic(), trial.config, trial.plan.kind == "mps"
    # What an Apple GPU holds is counted as on a CUDA GPU, but for attention: it keeps all scores.
    plan = replace(trial.plan, device="cuda:0") if apple else trial.plan
    if recipe_of(config).fullest is None:
        raise NotExecuted(f"recipe {config.recipe} has no step that could be executed without its data")
    make_built_in(config.model)  # as torch is without virtual GPUs
    torch.set_num_threads(1)
    processes.hide_real_gpus()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in (*RANK_VARIABLES, "TRIMTAB_LAUNCHER"):
        os.environ.pop(name, None)
    if plan.processes > 1:
        os.environ.update(one_rank.variables(0, plan.processes, plan.processes, 29500, "trial"))
    first = trial.gpus[0]
    major, _, minor = (first.capability or "9.0").partition(".")
    machine = install(
        len(trial.gpus),
        memory=min(gpu.free_bytes for gpu in trial.gpus) if trial.snug else _ROOM,
        name=first.model,
        capability=(int(major), int(minor or 0)),
        shapes=True,
    )
    machine.repeats = "alike"  # nobody listens to what happens inside of a layer
    loading.build_from_configs(machine)
    kinds.listen(machine)
    if apple:
        for fused in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    tally = Tally()
    if trial.counts:
        tally.listen(machine)
        _count_replays(tally)
    folder = Path(tempfile.mkdtemp(prefix="trimtab-trial-"))
    try:
        rows, passes = _steps(replace(trial, plan=plan), folder, tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    memory = {str(device.device): _held(device) for device in machine.devices if device.peak}
    if plan.processes > 1:
        # The other ranks hold on their GPUs what this one holds on its own.
        memory = {f"cuda:{rank}": memory["cuda:0"] for rank in range(plan.processes)}
    taken = time.monotonic() - began
    return Executed(memory=memory, rows=rows, passes=passes, work=tally.work(), seconds=taken)


def _steps(trial: Trial, folder: Path, tally: Tally) -> tuple[str, int]:
    from transformers import set_seed

    from trimtab.fast.apply import make_fast
    from trimtab.models.tuned import load_tuned
    from trimtab.placement import prepare_process
    from trimtab.recipes.recipe import Job
    from trimtab.recipes.run_folder import RunFolder
    from trimtab.recipes.table import recipe_of

    config, plan = only_the_steps(trial.config), trial.plan
    recipe = recipe_of(config)
    assert recipe.fullest is not None
    prepare_process(plan)
    set_seed(config.seed)
    passes = config.training.gradient_accumulation_steps * plan.processes * STEPS
    made = recipe.fullest(config, config.training.batch_size * passes)
    if trial.rows:
        train = [*islice(cycle(trial.rows), config.training.batch_size * passes)]
        made = Fullest(replace(made.prepared, train=train), LONGEST.format(rows=config.training.batch_size))
    run = RunFolder(folder)
    job = Job(config, plan, run, _silent, None, made.prepared)
    job.model = load_tuned(config, plan, recipe.family, recipe.fit)
    if recipe.fast:
        job.fast = make_fast(job.model, plan, _silent, rows=made.prepared.train)
    with recipe.build(job) as driver:
        driver.open()
        _train(driver, tally)
    return made.rows, config.training.gradient_accumulation_steps


def only_the_steps(config: Config) -> Config:
    """The same run without what a step does not need: evaluations, trackers, workers, more accumulated passes than two.
    What no memory hangs on is as it is where nobody says, so that who changes it is told again what was executed.

    From the second pass on gradients lie beside the activations, and no later pass holds more; but what a rewarded step
    learns from is generated for all of its passes at once. A projection of DiZO's comes within the steps.
    """
    from trimtab.recipes.table import recipe_of

    passes = config.training.gradient_accumulation_steps
    training = config.training.model_copy(
        update={
            **{name: type(config.training).model_fields[name].default for name in _HELD_BY_NONE},
            "max_steps": STEPS,
            "gradient_accumulation_steps": passes if recipe_of(config).rewarded else min(passes, 2),
            "effective_batch_size": None,
            "resume": False,
            "halve_batch_on_oom": False,
            "dataloader_workers": 0,
        }
    )
    # A row of full length is a packed sequence of one row.
    data = config.data.model_copy(update={"packing": False})
    monitor = type(config.monitor)(stop_on_nonfinite=config.monitor.stop_on_nonfinite)
    zeroth = config.zeroth.model_copy(update={"interval": min(config.zeroth.interval, STEPS)})
    return config.model_copy(
        update={
            "training": training,
            "data": data,
            "monitor": monitor,
            "zeroth": zeroth,
            **{
                name: type(config).model_fields[name].get_default(call_default_factory=True)
                for name in _OF_THE_RUN
            },
        }
    )


def _count_replays(tally: Tally) -> None:
    """A captured pass (zeroth/graph.py) is executed once, and launched as often as it is replayed."""
    from trimtab.zeroth import graph, rehearsed

    real = graph.capturing
    captured: WeakKeyDictionary[Any, Work] = WeakKeyDictionary()

    @contextmanager
    def capturing(made: Any, pool: Any, stream: Any) -> Iterator[None]:
        counted, tally.on = tally.on, True
        try:
            with tally.standing_for("capture"), real(made, pool, stream):
                yield
        finally:
            tally.on = counted
            captured[made] = tally.sections.pop("capture", {})

    def replay(made: Any) -> None:
        for launch, number in captured[made].items():
            tally.add(launch._replace(by="graph"), number)

    setattr(graph, "capturing", capturing)  # noqa: B010
    setattr(rehearsed.RehearsedGraph, "replay", replay)  # noqa: B010


class _Enough(BaseException):
    """The steps are made."""


def _train(driver: Any, tally: Tally) -> None:
    """As many steps as asked for, by the driver's own loop; what comes after them (saving) is left out."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from trimtab.placement import PlacementGuard

    tally.section = "pass"
    engine = getattr(driver, "engine", None)
    if engine is not None:
        for step in range(STEPS):
            tally.on = step == STEPS - 1
            engine.step()
        return
    # What proves a run's placement reads every gradient, which shapes do not have.
    driver.trainer.remove_callback(PlacementGuard)
    made = 0

    def stepped(*_: Any) -> None:
        nonlocal made
        made += 1
        tally.section, tally.on = "pass", made == STEPS - 1
        if made == STEPS:
            raise _Enough

    def updates(*_: Any) -> None:
        tally.section = "update"

    register_optimizer_step_pre_hook(updates)
    register_optimizer_step_post_hook(stepped)
    try:
        driver.train()
    except _Enough:
        return
    raise NotExecuted(f"the trainer ended after {made} of {STEPS} steps")


def _held(device: VirtualDevice) -> Held:
    peaks = device.ledger.peaks()
    fullest = max(peaks, key=lambda peak: peak.peak_bytes)
    return Held(
        peak=fullest.peak_bytes,
        reserved=max(peak.reserved_bytes for peak in peaks),
        context=device.context_bytes,
        kinds=fullest.kinds,
    )


def _silent(text: str) -> None:
    """Nobody listens to a trial."""
