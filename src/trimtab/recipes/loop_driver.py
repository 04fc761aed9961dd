"""Drives a training loop of our own: steps, evaluations, checkpoints, the best of them, interrupts, several processes.

What a step is and what is measured is an engine's, which a recipe brings. Evaluations and checkpoints change no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch.distributed as dist

from trimtab.config import keeps_best
from trimtab.manifest import Part
from trimtab.monitor.loop import LoopMonitor
from trimtab.monitor.norms import Norms
from trimtab.monitor.verdict import History
from trimtab.placement import bare_model
from trimtab.recipes.checkpoints import check_best, fault, name_of, rotate
from trimtab.recipes.interrupt import GracefulStop
from trimtab.recipes.recipe import Job
from trimtab.recipes.smaller_batches import step_watched
from trimtab.recipes.zeroth_checkpoint import Progress, load_checkpoint, load_weights, save_checkpoint
from trimtab.zeroth.optimizer import NotFinite
from trimtab.zeroth.peers import gather, together


class Engine(Protocol):
    """A recipe's part of the loop."""

    total: int
    """Steps of the whole run."""
    steps_per_epoch: int
    evaluates: bool
    """Whether there is something held out."""

    @property
    def skipped(self) -> int:
        """Steps that changed no weight, for numbers in them that were not finite."""

    def open(self, *, main: bool) -> None:
        """Begin or go on in the run's folder, or refuse; the main process writes."""

    def step(self) -> tuple[int, int, dict[str, float], tuple[str, ...]]:
        """One step: its number, the data drawn so far, its figures, and those that are shown beside the loss."""

    def measure(self, heard: Callable[[int, int], None]) -> dict[str, float]:
        """Figures of the weights as they are on what is held out; every process calls it."""

    def drawn(self) -> list[dict[str, Any]]:
        """The parts of the batches of the latest step, those of every process in turn; none before the first."""

    def losses_again(self, batch: dict[str, Any]) -> Any:
        """The losses of one of them, computed again by this process alone."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights."""

    def beside(self) -> dict[str, Part]:
        """Files of the run's folder that a checkpoint relies on, as far as they reach by now, and on the disk."""

    def restore(self, state: dict[str, Any], taken: int) -> None:
        """Go on from a state, after so many draws of data."""


class LoopDriver:
    """The loop around an engine."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self._job = job
        self.engine: Any = engine
        self.progress = Progress()
        if job.checkpoint is not None:
            state, self.progress = load_checkpoint(job.checkpoint, job.model)
            engine.restore(state, self.progress.taken)
            self._look_at_the_best()
        self.ended_early = False
        self._contexts = ExitStack()

    def _look_at_the_best(self) -> None:
        """A best checkpoint that is no longer what it was is said, and no longer counts."""
        best, job = self.progress.best_step, self._job
        if best is None or not keeps_best(job.config):
            return
        if reason := fault(job.run.checkpoints / name_of(best)):
            job.say(
                f"warning: the best checkpoint so far, {name_of(best)}, is damaged: {reason}\n"
                "  its weights cannot be kept: the best is looked for among those from here on"
            )
            self.progress.best_step = self.progress.best_loss = None

    def __enter__(self) -> LoopDriver:
        job, plan = self._job, self._job.plan
        rank = 0
        if plan.processes > 1:
            # A few numbers a step, on the CPU: gloo carries them wherever the model is.
            dist.init_process_group("gloo")
            self._contexts.callback(dist.destroy_process_group)
            rank = dist.get_rank()
        self.main = rank == 0
        monitor = LoopMonitor(
            job.config.monitor, job.run.path, plan.device, rank, plan.processes, devices=plan.devices
        )
        self._monitor = self._contexts.enter_context(monitor)
        self._stop = GracefulStop(monitor.say)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def open(self) -> None:
        self.engine.open(main=self.main)

    def together(self, doing: str) -> AbstractContextManager[None]:
        return together(doing)

    @property
    def steps(self) -> tuple[int, int]:
        return self.progress.step, self.engine.total

    @property
    def skipped(self) -> int:
        return int(self.engine.skipped)

    @property
    def warnings(self) -> list[dict[str, Any]]:
        return self._monitor.warnings

    @property
    def model(self) -> Any:
        return self._job.model

    @property
    def kept_step(self) -> int:
        """The step whose weights are kept: the best, where that is asked for and known, else the last."""
        best = self.progress.best_step if keeps_best(self._job.config) and self.engine.evaluates else None
        return best or self.progress.step

    def train(self) -> None:
        progress, engine, training = self.progress, self.engine, self._job.config.training
        eval_every = training.eval_steps or engine.steps_per_epoch
        save_every = training.save_steps or eval_every
        self._begun, at_begin = progress.step, self._weights()
        self._monitor.growth = lambda: self._weights().total() / (at_begin.total() or math.inf)
        self._stop.on_train_begin(None, None, None)
        try:
            self._monitor.begin(progress.step, engine.total)
            due = engine.evaluates and progress.step % eval_every == 0
            if due and not progress.evaluation_at(progress.step):
                self._measure()  # the untouched model, or the step at which the run was stopped
                progress.saved()
            while progress.step < engine.total and not self.ended_early:
                with step_watched() if training.halve_batch_on_oom else nullcontext():
                    progress.step, progress.taken, figures, shown = engine.step()
                last = progress.step == engine.total
                log = last or progress.step == 1 or progress.step % training.logging_steps == 0
                self._monitor.step(progress.step, figures, shown, log=log)
                self.ended_early = self._told_to_end() and not last
                if engine.evaluates and not self.ended_early and (last or progress.step % eval_every == 0):
                    self._measure()
                if self.ended_early or last or progress.step % save_every == 0:
                    self._save()
            self._monitor.end()
        except NotFinite as error:
            told = NotFinite(self._why(error))
            self._monitor.write(progress.step + 1, "nonfinite", {"message": str(told)})
            raise told from error
        finally:
            self._stop.restore()

    def _why(self, error: NotFinite) -> str:
        """The error's text with the reason, which the main process looks for; all that raise it get it."""
        said, alone = "", not error.on_all_ranks or self._job.plan.processes == 1
        if self.main or alone:
            history = History(
                self.progress.step - self._begun,
                self._monitor.losses,
                self._monitor.growth(),
                self._job.config.training.learning_rate,
                frozenset(name for name, p in self.model.named_parameters() if p.requires_grad),
            )
            said = self._monitor.unfinished(
                str(error),
                self.progress.step + 1,
                self.engine.drawn(),
                self.engine.losses_again,
                (bare_model(self.model), self._job.prepared.processor, history),
                self._job.plan.processes,
            )
        return said if alone else str(gather(said)[0])

    def _weights(self) -> Norms:
        return Norms.of([(name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad])

    def _told_to_end(self) -> bool:
        """Whether one of the processes was; every one has to ask."""
        own = self._stop.stopped
        return own if self._job.plan.processes == 1 else any(gather(own))

    def _measure(self) -> None:
        """Measure the weights as they are, and remember the figures with their step."""
        figures = self.engine.measure(self._monitor.evaluating)
        self._monitor.evaluated(self.progress.step, figures)
        self.progress.add(figures)

    def _save(self) -> None:
        job, progress = self._job, self.progress
        progress.saved()
        with together("saving a checkpoint"):
            if self.main:
                state, beside = self.engine.state(), self.engine.beside()
                save_checkpoint(job.run, job.model, state, progress, beside)
                best = progress.best_step if keeps_best(job.config) else None
                rotate(job.run.checkpoints, job.config.training.save_total_limit, best)
        self._monitor.saved(progress.step)

    def measure(self) -> dict[str, float]:
        figures: dict[str, float] = self.engine.measure(self._monitor.evaluating)
        return figures

    def settle(self) -> dict[str, Any] | None:
        if self.main and self.kept_step != self.progress.step:
            best = self._job.run.checkpoints / name_of(self.kept_step)
            check_best(best, self._job.run.path)
            load_weights(best, self._job.model)
        return None

    def part(self) -> None:
        return None
