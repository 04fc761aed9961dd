"""One run, whatever its recipe, read from top to bottom: prepare, load, verify, build, train, keep, tell.

What differs between recipes is in their own files; where things lie is the plan's; what carries the steps out is a
driver. What was trained is kept before anything else is done with it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Literal

import torch
from transformers import set_seed

from trimtab.config import Config
from trimtab.fast.apply import make_fast
from trimtab.hardware.launcher import detect_launcher
from trimtab.models.load import shapes_only
from trimtab.models.tuned import load_tuned
from trimtab.placement import PlacementPlan, own_stream, prepare_process, profile_model
from trimtab.recipes.card import model_card
from trimtab.recipes.checkpoints import checkpoint_to_resume, clear_leftovers, set_aside_later
from trimtab.recipes.disk_needs import room_for
from trimtab.recipes.elastic import agree_on_checkpoint
from trimtab.recipes.kept_folder import clear_half_made, whole_kept, write_card
from trimtab.recipes.look import Look
from trimtab.recipes.meeting import meet_the_others
from trimtab.recipes.recipe import Driver, Job, Recipe, Say
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.shortages import memory_error, shortages_told
from trimtab.recipes.smaller_batches import (
    StepOutOfMemory,
    announced,
    as_recorded,
    made_smaller,
    read_record,
    release,
    to_be_started_again,
)
from trimtab.recipes.starting import Starting
from trimtab.recipes.table import recipe_of
from trimtab.recipes.vigil import open_board
from trimtab.redaction import without_secrets

BASELINE = "baseline.json"


def run_recipe(config: Config, plan: PlacementPlan, run: RunFolder, say: Say = print) -> dict[str, Any]:
    """Train as the config says where the plan says; returns the summary that is also kept in the run's folder."""
    recipe = recipe_of(config)
    prepare_process(plan)
    config = as_recorded(config, run, say)
    while True:
        try:
            with (
                shortages_told(recipe, config, plan, run),
                own_stream(plan) if recipe.captures else nullcontext(),
            ):
                return _run(recipe, config, plan, run, say)
        except StepOutOfMemory as error:
            smaller = made_smaller(config, run, error.lack)
            if smaller is None:
                raise memory_error(error.lack, recipe, config, plan, run) from error
            if plan.processes > 1:
                raise to_be_started_again(config, smaller, run, error.lack) from error
            say(announced(config, smaller, run, error.lack))
            resume = run.newest_checkpoint() is not None
        # Here, where the error and all that its traceback held are gone.
        release()
        config = _going_on(smaller) if resume else smaller


def _going_on(config: Config) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"resume": True})})


def _run(recipe: Recipe, config: Config, plan: PlacementPlan, run: RunFolder, say: Say) -> dict[str, Any]:
    set_seed(config.seed)
    if shapes_only():
        # The little that has values is computed sooner than a second thread has heard of it.
        torch.set_num_threads(1)
    checkpoint = checkpoint_to_resume(config, run, say)
    start = Starting(config, plan, checkpoint)
    job = Job(config, plan, run, say, checkpoint, recipe.prepare(config, plan, say))
    start.check_data(job.prepared, say)

    job.model = load_tuned(config, plan, recipe.family, recipe.fit)
    say(f"model {config.model.name} on {', '.join(plan.devices)}, weights {plan.weight_precision}")
    _check_room(job)
    if recipe.prove is not None:
        recipe.prove(job)
    if recipe.fast:
        main = detect_launcher().rank == 0
        job.fast = make_fast(job.model, plan, say if main else None, rows=job.prepared.train)

    meet_the_others(config, plan, say)
    with recipe.build(job) as driver:
        agree_on_checkpoint(checkpoint, plan)
        with driver.together("opening the run's folder"):
            if checkpoint is not None:
                driver.open()  # what may refuse to go on comes first: then nothing of the run has been overwritten
                start.check_steps(*driver.steps)
            if driver.main:
                run.begin(config, plan, job.prepared.report.as_dict(), say, start.record(run.path))
                _tidy(job)
                open_board(run)
            if checkpoint is None:
                driver.open()
        before = _first_look(recipe, job, driver)
        started = time.perf_counter()
        try:
            driver.train()
        finally:
            run.reached(*driver.steps)
        summary = _summary(job, driver, time.perf_counter() - started)
        with driver.together("keeping what was trained"):
            if not driver.ended_early:
                _keep(job, driver)
            summary |= recipe.outcome(job, driver)
            _tell(job, driver, summary)
        if driver.ended_early:
            driver.part()
        elif before is not None:
            # Last, for it may take long: what was trained is safe by now.
            _compare(recipe, job, summary, before, _look(recipe, job, driver, "after"))
            _tell(job, driver, summary)
    return summary


def _check_room(job: Job) -> None:
    """Once more what will be written, now that the number of rows, and so of checkpoints, is known."""
    if detect_launcher().rank == 0:
        tensors = sum(parameter.requires_grad for parameter in job.model.parameters())
        room = room_for(
            job.config, job.plan, profile_model(job.model), tensors, job.run, len(job.prepared.train)
        )
        room.check(job.config)
        job.run.needs = room.needs()
        if room.close:
            job.say(f"! disk: {room.figures()}")


def _tidy(job: Job) -> None:
    """Clear away what a kill left half-written, and set aside what a course that is not gone on with left behind."""
    clear_half_made(job.run.path, job.say)
    clear_leftovers(job.run.checkpoints)
    if job.checkpoint is not None:
        set_aside_later(job.run.checkpoints, job.checkpoint, job.say)


def _summary(job: Job, driver: Driver, seconds: float) -> dict[str, Any]:
    """What every summary tells."""
    steps, planned = driver.steps
    prepared, plan = job.prepared, job.plan
    smaller = read_record(job.run)
    return {
        "status": "interrupted" if driver.ended_early else "finished",
        "recipe": job.config.recipe,
        "steps": steps,
        "planned_steps": planned,
        "skipped_steps": driver.skipped,
        "warnings": driver.warnings,
        "train_seconds": round(seconds, 1),
        "device": plan.device,
        "precision": plan.precision,
        "strategy": plan.strategy,
        "train_rows": len(prepared.train),
        "eval_rows": len(prepared.eval) if prepared.eval is not None else 0,
        "eval_loss": {"before": None, "after": None},
        "samples": [],
        **({"halved": smaller} if smaller is not None else {}),
        **({"speed": job.fast.as_dict()} if job.fast is not None and job.fast.as_dict() else {}),
    }


def _first_look(recipe: Recipe, job: Job, driver: Driver) -> Look | None:
    """Answers before the first step; a resumed run reads those of its first start, if it asks the same."""
    run, asked = job.run, recipe.looked_at(job.config)
    if recipe.look is None or not any(asked.values()):
        return None
    if job.checkpoint is not None and (run.path / BASELINE).is_file():
        kept = run.read_json(BASELINE)
        if all(kept.get(name) == value for name, value in asked.items()):
            return Look(**kept["look"])
    # The checkpoint is not loaded yet: also of a resumed run these are answers of the untouched model.
    look = _look(recipe, job, driver, "before")
    if driver.main:
        run.write_json(BASELINE, asked | {"answers": look.answers, "look": look._asdict()})
    return look


def _look(recipe: Recipe, job: Job, driver: Driver, stage: Literal["before", "after"]) -> Look:
    assert recipe.look is not None
    job.stage, job.main = stage, driver.main
    if job.plan.strategy == "sharded":
        # No process holds the whole model, so none can answer by itself.
        return Look(["(not sampled: the model is sharded)"] * len(recipe.asks(job)))
    return recipe.look(job, driver.model)


def _compare(recipe: Recipe, job: Job, summary: dict[str, Any], before: Look, after: Look) -> None:
    """Both looks side by side, into the summary."""
    asked = zip(recipe.asks(job), before.answers, after.answers, strict=True)
    summary["samples"] = [sample | {"before": old, "after": new} for sample, old, new in asked]
    if after.of:
        figures = {"before": before.right / before.of, "after": after.right / after.of}
        summary.setdefault("metrics", {})[f"{after.scored} on {after.of} held-out rows"] = figures


def _keep(job: Job, driver: Driver) -> None:
    """Write the adapter (or the whole model) and the tokenizer, from the process that writes."""
    weights = driver.settle()
    if driver.main:
        driver.model.config.use_cache = True
        with whole_kept(job.run.claim(job.run.kept_folder(job.config).name), job.say) as target:
            driver.model.save_pretrained(target, state_dict=weights)
            job.prepared.processor.save_pretrained(target)


def _tell(job: Job, driver: Driver, summary: dict[str, Any]) -> None:
    """The summary, and the card beside the weights."""
    if driver.main:
        if not driver.ended_early:
            card = without_secrets(model_card(job.config, job.plan, summary))
            write_card(job.run.kept_folder(job.config), card)
        job.run.write_json("summary.json", summary)
