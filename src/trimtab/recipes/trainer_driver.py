"""Drives a trainer of Hugging Face or TRL: watched, held to the plan, stopped at whole steps.

The device in force is the plan's: in the model, in the trainer's arguments and in the batches.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PrinterCallback, Trainer, TrainingArguments

from trimtab.config import Config, keeps_best
from trimtab.models.load import shapes_only
from trimtab.monitor.callback import MonitorCallback
from trimtab.placement import PlacementGuard, PlacementPlan, bind_arguments, trainer_options
from trimtab.placement.optimizer import choose_optimizer
from trimtab.recipes.interrupt import GracefulStop
from trimtab.recipes.lean_steps import lean_steps
from trimtab.recipes.recipe import Job
from trimtab.recipes.rehearsed_rows import evaluated
from trimtab.recipes.resumed_state import ResumedState
from trimtab.recipes.row_order import (
    AT_THE_END,
    FEW,
    FEW_SHARDED,
    FEW_STEPS,
    HEAVIEST_FIRST,
    end_after,
    heaviest_first,
    is_longer,
    look_at_the_end,
    order_by_epoch,
)
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.smaller_batches import step_watched
from trimtab.recipes.trainer_loading import load_all
from trimtab.recipes.trainer_saving import gather_the_adapter, save_whole
from trimtab.rehearse.process import rehearsal_notes, rehearsed_steps

_NOT_OF_THE_MODEL = ("runtime", "_per_second", "_time", "epoch", "num_tokens")
"""How names of what an evaluation tells of itself end."""


def trainer_arguments(
    config: Config,
    plan: PlacementPlan,
    run: RunFolder,
    *,
    evaluates: bool,
    best: str = "eval_loss",
    model: Any = None,
) -> dict[str, Any]:
    """Every setting of `TrainingArguments` that recipes share; device and precision come from the plan alone.

    `best` is the figure that tells the best checkpoint; of a reward the highest, of a loss the lowest.
    """
    training = config.training
    rhythm = "steps" if training.eval_steps else "epoch"
    saves = "steps" if training.save_steps or training.eval_steps else "epoch"
    keep_best = keeps_best(config) and evaluates
    return {
        "output_dir": str(run.checkpoints),
        "num_train_epochs": training.epochs,
        "max_steps": training.max_steps or -1,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.eval_batch_size or training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.gradient_checkpointing,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "warmup_steps": training.warmup_ratio if training.warmup_steps is None else training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": choose_optimizer(training.optimizer, plan.kind).name,
        # Inside train(): evaluate() before it would leave the model unwrapped, and ranks would never meet.
        # A run that goes on has the figures of its start, and those of the step that it stands at, in its checkpoint.
        "eval_on_start": evaluates and not training.resume,
        "eval_strategy": rhythm if evaluates else "no",
        "eval_steps": training.eval_steps,
        "save_strategy": saves,
        "save_steps": training.save_steps or training.eval_steps or 500,
        # The trainer would delete whatever is named checkpoint-*; which ones go is ours to decide (trainer_saving.py).
        "save_total_limit": None,
        "load_best_model_at_end": keep_best,
        "metric_for_best_model": best if keep_best else None,
        "greater_is_better": not best.endswith("loss") if keep_best else None,
        "logging_steps": training.logging_steps,
        "logging_first_step": True,
        # A NaN loss must be seen, not replaced by the running mean.
        "logging_nan_inf_filter": False,
        "dataloader_num_workers": training.dataloader_workers,
        "report_to": config.monitor.report_to or "none",
        "disable_tqdm": True,
        "seed": config.seed,
        "data_seed": config.seed,
        "push_to_hub": False,
        **trainer_options(plan, model),
    }


class TrainerDriver:
    """A trainer with our callbacks around it. `own` goes to the trainer's class as it is."""

    def __init__(
        self,
        job: Job,
        trainer: type[Trainer],
        arguments: TrainingArguments,
        *,
        stop_every: int = 1,
        **own: Any,
    ) -> None:
        """`stop_every`: how many steps belong together; the run stops after the last of them."""
        plan, prepared = job.plan, job.prepared
        bind_arguments(arguments, plan)
        self._job = job
        self.main = arguments.process_index == 0
        self.monitor = MonitorCallback(job.config.monitor, job.run.path, plan.device, devices=plan.devices)
        self._stop = GracefulStop(self.monitor.say, every=stop_every)
        guard = PlacementGuard(plan, self.monitor.say if self.main else None)
        if arguments.dataloader_num_workers:
            # Threads do not survive a fork: told so, tokenizers use none, and do not warn of it in each worker.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        held_out = prepared.eval
        if shapes_only():
            held_out = evaluated(held_out, arguments.per_device_eval_batch_size, plan.processes)
        self.trainer: Any = trainer(
            model=job.model,
            args=arguments,
            train_dataset=prepared.train,
            eval_dataset=held_out,
            processing_class=prepared.processor,
            # The stop before the monitor: it may ask for a checkpoint, before which every verdict is read.
            callbacks=[ResumedState(job.run.checkpoints), self._stop, self.monitor, guard],
            **own,
        )
        self.monitor.watch(self.trainer)
        if job.fast is not None:
            job.fast.tell_by(self.monitor.say if self.main else None, self._compiled)
        self.trainer.remove_callback(PrinterCallback)
        save_whole(self.trainer, job.run, job.config.training.save_total_limit, job.say)
        if plan.strategy == "sharded":
            gather_the_adapter(self.trainer)
        load_all(self.trainer)
        order_by_epoch(self.trainer)
        if shapes_only():
            self._rehearse_what_takes_most(stop_every)
        _end_at_the_last_step(self.trainer)
        if job.config.training.halve_batch_on_oom:
            _watch_memory(self.trainer)

    def _rehearse_what_takes_most(self, a_round: int) -> None:
        """By shapes: the heaviest batch early, and no more steps than show what is held; `a_round` belong together."""
        job, steps = self._job, rehearsed_steps()
        few = max(FEW_SHARDED if job.plan.strategy == "sharded" else FEW, a_round + 1)
        # A run that goes on has made more of them already.
        cut = steps is None and job.checkpoint is None and is_longer(self.trainer, few)
        if job.prepared.length is not None:
            padded = job.plan.speed.padding != "none"
            made = few if cut else steps
            if heaviest_first(self.trainer, job.prepared.length, padded=padded, steps=made):
                rehearsal_notes(HEAVIEST_FIRST)
        if cut:
            end_after(self.trainer, few)
            rehearsal_notes(FEW_STEPS.format(made=few))
        # What sharded weights are gathered for takes longest of all, and the same each time.
        if steps is None and job.plan.strategy == "sharded" and look_at_the_end(self.trainer):
            rehearsal_notes(AT_THE_END)

    def _compiled(self, figures: dict[str, Any]) -> None:
        self.monitor.write(self.trainer.state.global_step, "compiled", figures)

    def __enter__(self) -> TrainerDriver:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.restore()
        self.monitor.close()

    def open(self) -> None:
        return None

    def together(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self) -> None:
        checkpoint = self._job.checkpoint
        try:
            with lean_steps(self.trainer):
                self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            self._stop.restore()
            self.monitor.close()

    @property
    def ended_early(self) -> bool:
        return self._stop.ended_early

    @property
    def steps(self) -> tuple[int, int]:
        return self.trainer.state.global_step, self.trainer.state.max_steps

    @property
    def skipped(self) -> int:
        return self.monitor.skipped

    @property
    def warnings(self) -> list[dict[str, Any]]:
        return self.monitor.warnings

    @property
    def model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def measure(self) -> dict[str, float]:
        told = {name.removeprefix("eval_"): value for name, value in self.trainer.evaluate().items()}
        return {name: value for name, value in told.items() if not name.endswith(_NOT_OF_THE_MODEL)}

    def settle(self) -> dict[str, Any] | None:
        if self._job.plan.strategy != "sharded":
            return None
        weights: dict[str, Any] = self.trainer.accelerator.get_state_dict(self.trainer.model)
        return weights

    def part(self) -> None:
        # The first process that leaves with an error has the launcher end the others, written or not.
        self.trainer.accelerator.wait_for_everyone()

    @property
    def best(self) -> float | None:
        """The figure of the checkpoint that is kept, where the best one is."""
        kept = self.trainer.args.load_best_model_at_end
        return self.trainer.state.best_metric if kept else None

    @property
    def history(self) -> list[dict[str, Any]]:
        """All that was logged, also before a resume."""
        logged: list[dict[str, Any]] = self.trainer.state.log_history
        return logged


def _watch_memory(trainer: Any) -> None:
    """A step that finds no memory says so by an error of its own, for the run to go on with smaller batches."""
    trainer.training_step = step_watched()(trainer.training_step)


def _end_at_the_last_step(trainer: Any) -> None:
    """A checkpoint of the last step has nothing left to train; the trainer looks at that only after another step."""
    run_epoch = trainer._run_epoch

    def unless_done(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        else:
            run_epoch(*args, **kwargs)

    trainer._run_epoch = unless_done
