"""Zeroth-order fine-tuning (MeZO, DiZO, FZOO) on questions with given answers: load, adapt, verify, step, keep.

No gradient is ever computed. Weights change in one place only, the optimizer's update; evaluations, checkpoints and
perturbed passes leave every bit as it was. Of several processes each takes its own micro-batches, and they exchange
losses alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.config import Config, keeps_best
from trimtab.config.defaults import with_recipe_defaults
from trimtab.data.scored import prepare_scored
from trimtab.data.tasks import Question
from trimtab.errors import RequestError, TrimtabError
from trimtab.models import load_model, load_tokenizer
from trimtab.models.adapters import add_lora
from trimtab.monitor.loop import LoopMonitor
from trimtab.placement import PlacementPlan, own_stream, prepare_process, verify
from trimtab.recipes.interrupt import GracefulStop
from trimtab.recipes.ranks import Ranks
from trimtab.recipes.run_folder import RunFolder, checkpoint_to_resume
from trimtab.recipes.scored_eval import evaluate, measures
from trimtab.recipes.trained import keep_model
from trimtab.recipes.zeroth_checkpoint import (
    Progress,
    forget_old,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from trimtab.zeroth.batches import BatchStream, Collate
from trimtab.zeroth.objective import Example
from trimtab.zeroth.optimizer import NotFinite, StepResult, ZerothOrder
from trimtab.zeroth.peers import together
from trimtab.zeroth.settings import Schedule, ZerothSettings
from trimtab.zeroth.tokens import encode_example, starts_with

Say = Callable[[str], None]
TRAJECTORY = "trajectory.bin"
COMPILE_FROM = 5000
"""Steps from which a model on a GPU is compiled before its passes are captured."""


def run_zeroth_order(config: Config, plan: PlacementPlan, run: RunFolder, say: Say = print) -> dict[str, Any]:
    """Tune as the config says where the plan says; returns the summary that is also kept in the run's folder."""
    prepare_process(plan)
    with own_stream(plan):
        return _run(config, plan, run, say)


def _run(config: Config, plan: PlacementPlan, run: RunFolder, say: Say) -> dict[str, Any]:
    config, _ = with_recipe_defaults(config)
    training = config.training
    checkpoint = checkpoint_to_resume(config, run)

    tokenizer: Any = load_tokenizer(config.model)
    data = prepare_scored(config)
    for line in data.report.lines():
        say(line)
    answer_alone = data.task is not None and data.task.train_on == "answer"
    examples, _ = encode_all(tokenizer, data.train, config, say, gold_alone=answer_alone)
    held_out, questions = encode_all(tokenizer, data.eval, config, say)

    model: Any = load_base(config, plan)
    say(f"model {config.model.name} on {', '.join(plan.devices)}, weights {plan.weight_precision}")
    verify(model, plan)
    model.eval()

    collate = Collate(
        tokenizer.pad_token_id,
        config.data.max_length,
        bos_id=starts_with(tokenizer),
        pad_to_multiple=1 if plan.kind == "cpu" else 16,
    )
    micro_batches = training.gradient_accumulation_steps * plan.processes
    batches = BatchStream(examples, training.batch_size, micro_batches, config.seed, collate)
    total = training.max_steps or math.ceil(training.epochs * batches.steps_per_epoch)
    optimizer = ZerothOrder(model, engine_settings(config, total))
    for line in optimizer.describe():
        say(line)

    progress = Progress()
    if checkpoint is not None:
        state, progress = load_checkpoint(checkpoint, model)
        optimizer.load_state_dict(state)
        batches.taken = progress.taken

    with (
        Ranks(plan) as ranks,
        LoopMonitor(config.monitor, run.path, plan.device, ranks.rank, ranks.count) as monitor,
    ):
        with together("opening the run's folder"):
            # First what may refuse to go on: then nothing of the earlier run has been overwritten.
            optimizer.record(run.path / TRAJECTORY, **about(config, plan))
            if ranks.main:
                run.write_request(config, plan, data.report.as_dict())

        def judge() -> None:
            """Measure the weights as they are, and remember the figures with their step."""
            size = training.eval_batch_size or training.batch_size
            figures = measures(
                evaluate(model, held_out, collate, size, monitor.evaluating), questions, data.task
            )
            monitor.evaluated(progress.step, figures)
            progress.add(figures)

        def save() -> None:
            progress.saved()
            with together("saving a checkpoint"):
                if ranks.main:
                    save_checkpoint(run, model, optimizer.state_dict(), progress)
                    best = progress.best_step if keeps_best(config) else None
                    forget_old(run, progress.step, training.save_total_limit, best)
            monitor.saved(progress.step)

        stop, stopped, started = GracefulStop(monitor.say), False, time.perf_counter()
        eval_every = training.eval_steps or batches.steps_per_epoch
        save_every = training.save_steps or eval_every
        stop.on_train_begin(None, None, None)
        try:
            monitor.begin(progress.step, total)
            if held_out and progress.step % eval_every == 0 and not progress.evaluation_at(progress.step):
                judge()  # the untouched model, or the step at which the run was stopped
                progress.saved()
            while progress.step < total and not stopped:
                result = optimizer.step(batches())
                optimizer.project(batches)  # where one is due
                progress.step, progress.taken = optimizer.step_number, batches.taken
                last = progress.step == total
                log = last or progress.step == 1 or progress.step % training.logging_steps == 0
                monitor.step(progress.step, *figures_of(result, optimizer), log=log)
                stopped = ranks.any(stop.stopped) and not last
                if held_out and not stopped and (last or progress.step % eval_every == 0):
                    judge()
                if stopped or last or progress.step % save_every == 0:
                    save()
            monitor.end()
        except NotFinite as error:
            monitor.write(progress.step + 1, "nonfinite", {"message": str(error)})
            raise
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(config, plan) from error
        finally:
            run.reached(progress.step, total)
            stop.restore()

        seconds = time.perf_counter() - started
        summary = {
            "status": "interrupted" if stopped else "finished",
            "recipe": "zeroth_order",
            "zeroth": config.zeroth.method,
            "steps": progress.step,
            "planned_steps": total,
            "forwards": optimizer.forwards,
            "skipped_steps": optimizer.skipped,
            "projected_tensors": len(optimizer.projected),
            "train_seconds": round(seconds, 1),
            "device": plan.device,
            "precision": plan.precision,
            "strategy": plan.strategy,
            "train_rows": len(examples),
            "eval_rows": len(held_out),
        }
        with together("keeping what was trained"):
            if not stopped:
                best = progress.best_step if keeps_best(config) and held_out else None
                summary |= outcome(progress, kept_step=best or progress.step)
                if ranks.main:
                    if best not in (None, progress.step):
                        load_weights(run.checkpoints / f"checkpoint-{best}", model)
                    keep_model(model, tokenizer, config, plan, run, summary)
            if ranks.main:
                summary["trajectory_bytes"] = (run.path / TRAJECTORY).stat().st_size
                run.write_json("summary.json", summary)
    return summary


def figures_of(result: StepResult, optimizer: ZerothOrder) -> tuple[dict[str, float], tuple[str, ...]]:
    """A step's figures for metrics.jsonl, and those that are shown beside the loss."""
    # Of FZOO's several slopes the mean size: their signs mean nothing together.
    slopes = [abs(c) for c in result.coefficients] if len(result.coefficients) > 1 else result.coefficients
    slope = math.fsum(slopes) / len(slopes) if slopes else 0.0
    values = {
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "projected_gradient": slope,
        "forwards": optimizer.forwards,
    }
    return values, (f"projected gradient {slope:.3g}", f"forwards {optimizer.forwards:,}")


def outcome(progress: Progress, kept_step: int) -> dict[str, Any]:
    """The figures before the first step, and of the weights that are kept."""
    before, after = progress.evaluation_at(0), progress.evaluation_at(kept_step)
    return {
        "kept_step": kept_step,
        "eval_loss": {"before": before.get("loss"), "after": after.get("loss")},
        "metrics": {
            name: {"before": before[name], "after": after.get(name)}
            for name in before
            if name not in ("step", "loss")
        },
        "evaluations": progress.evaluations,
        "samples": [],
    }


def about(config: Config, plan: PlacementPlan) -> dict[str, Any]:
    """What a replay needs to make the model before the first step again."""
    made = {"model": config.model.model_dump(), "method": config.method, "seed": config.seed}
    if config.method == "lora":
        made["lora"] = config.lora.model_dump()
    return {"base": made | {"weight_precision": plan.weight_precision}}


def encode_all(
    tokenizer: Any, questions: Sequence[Question], config: Config, say: Say, *, gold_alone: bool = False
) -> tuple[list[Example], list[Question]]:
    """Questions as token ids; with `gold_alone` the right answer is the only candidate. What is too long is said."""
    examples, kept, long = [], [], 0
    least = 1 if starts_with(tokenizer) is None else 2
    for question in questions:
        options = [question.options[question.gold]] if gold_alone else question.options
        gold = 0 if gold_alone else question.gold
        example = encode_example(tokenizer, question.prompt, options, gold, question.where)
        answer = max(map(len, example.candidates))
        if len(example.prompt) + answer > config.data.max_length:
            long += 1
            if config.data.too_long == "drop":
                continue
            if config.data.max_length - answer < least:
                raise RequestError.of(
                    f"{question.where}: its longest answer has {answer:,} tokens",
                    f"data.max_length={config.data.max_length} leaves no room for the prompt before it",
                    "raise data.max_length, or set data.too_long=drop",
                )
        examples.append(example)
        kept.append(question)
    if long:
        what = "dropped" if config.data.too_long == "drop" else "lose the left end of their prompt"
        say(f"  {long:,} rows over data.max_length={config.data.max_length} {what}")
    if questions and not examples:
        raise RequestError.of(
            f"data.max_length={config.data.max_length}: every row is longer",
            "data.too_long=drop leaves none",
            "raise data.max_length, or set data.too_long=truncate",
        )
    return examples, kept


def load_base(config: Config, plan: PlacementPlan) -> Any:
    """The model before the first step. An adapter starts from the seed alone, so that a replay can make it again."""
    model: Any = load_model(config.model, plan)
    if config.method == "lora":
        torch.manual_seed(config.seed)
        model = add_lora(model, config.lora)
    return model


def engine_settings(config: Config, total: int) -> ZerothSettings:
    """The optimizer's settings from ours."""
    zeroth, training = config.zeroth, config.training
    assert zeroth.eps is not None, "the recipe's defaults are filled in"
    warmup = (
        math.ceil(training.warmup_ratio * total) if training.warmup_steps is None else training.warmup_steps
    )
    schedules: dict[str, Schedule] = {"linear": "linear", "cosine": "cosine"}
    return ZerothSettings(
        method=zeroth.method,
        learning_rate=training.learning_rate,
        eps=zeroth.eps,
        weight_decay=training.weight_decay,
        queries=zeroth.queries,
        interval=zeroth.interval,
        projection_eps=zeroth.projection_eps,
        projection_step=zeroth.projection_step,
        projection_clip=zeroth.projection_clip,
        projection_iterations=zeroth.projection_iterations,
        projection_roles=tuple(zeroth.projection_roles),
        lanes=zeroth.lanes,
        rounding=zeroth.rounding,
        # It takes some ten seconds for each shape of batch, and halves the time of a step.
        compile=total >= COMPILE_FROM,
        seed=config.seed,
        schedule=schedules.get(training.lr_scheduler, "constant"),
        warmup_steps=0 if training.lr_scheduler == "constant" else warmup,
        total_steps=total,
    )


def _out_of_memory(config: Config, plan: PlacementPlan) -> TrimtabError:
    return TrimtabError(
        f"out of memory on {plan.device} with training.batch_size={config.training.batch_size}, "
        f"data.max_length={config.data.max_length}\n"
        "  why: weights and the passes of one step did not fit (the plan's figure is an estimate)\n"
        "  change: set zeroth.lanes=1, halve training.batch_size and double "
        "training.gradient_accumulation_steps, or lower data.max_length"
    )
