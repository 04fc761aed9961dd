"""What recipes do around a trainer: answers to read before and after, the training itself, keeping the result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config import Config
from trimtab.models.sample import answer
from trimtab.placement import PlacementPlan
from trimtab.recipes.card import model_card
from trimtab.recipes.run_folder import RunFolder

if TYPE_CHECKING:
    # The datasets library, which a recipe that scores answers does without.
    from trimtab.data import PreparedData
    from trimtab.data.prompts import PromptData
    from trimtab.monitor import MonitorCallback
    from trimtab.recipes.interrupt import GracefulStop

BASELINE = "baseline.json"


def first_answers(
    trainer: Any, config: Config, plan: PlacementPlan, run: RunFolder, *, resumed: bool
) -> list[str]:
    """Answers before the first step; a resumed run reads those of its first start, if it asks the same."""
    prompts = config.samples.prompts
    if resumed and (run.path / BASELINE).is_file():
        kept = run.read_json(BASELINE)
        if kept.get("prompts") == prompts:
            return list(kept["answers"])
    # The checkpoint is not loaded yet: also of a resumed run these are answers of the untouched model.
    answers = sample_answers(trainer, config, plan)
    if trainer.args.process_index == 0:
        run.write_json(BASELINE, {"prompts": prompts, "answers": answers})
    return answers


def train(
    trainer: Any,
    config: Config,
    plan: PlacementPlan,
    run: RunFolder,
    data: PreparedData | PromptData,
    checkpoint: Path | None,
    monitor: MonitorCallback,
    stop: GracefulStop,
) -> dict[str, Any]:
    """Train to the end or to an interrupt; returns what every summary tells."""
    started = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        run.reached(trainer.state.global_step, trainer.state.max_steps)
        stop.restore()
        monitor.close()
    return {
        "status": "interrupted" if stop.ended_early else "finished",
        "recipe": config.recipe,
        "steps": trainer.state.global_step,
        "planned_steps": trainer.state.max_steps,
        "train_seconds": round(time.perf_counter() - started, 1),
        "device": plan.device,
        "precision": plan.precision,
        "strategy": plan.strategy,
        "train_rows": len(data.train),
        "eval_rows": len(data.eval) if data.eval is not None else 0,
    }


def samples(trainer: Any, config: Config, plan: PlacementPlan, before: list[str]) -> list[dict[str, str]]:
    """Each prompt with its answers before and after."""
    after = sample_answers(trainer, config, plan)
    return [
        {"prompt": prompt, "before": old, "after": new}
        for prompt, old, new in zip(config.samples.prompts, before, after, strict=True)
    ]


def sample_answers(trainer: Any, config: Config, plan: PlacementPlan) -> list[str]:
    if plan.strategy == "sharded":
        # No process holds the whole model, so none can answer by itself.
        return ["(not sampled: the model is sharded)"] * len(config.samples.prompts)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return answer(
        model, trainer.processing_class, config.samples.prompts, plan, config.samples.max_new_tokens
    )


def keep(trainer: Any, config: Config, plan: PlacementPlan, run: RunFolder, summary: dict[str, Any]) -> None:
    """Keep what the trainer trained, from the process that writes."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Gathering a sharded model is collective: every process takes part, one writes.
    weights = trainer.accelerator.get_state_dict(trainer.model) if plan.strategy == "sharded" else None
    if trainer.args.process_index == 0:
        keep_model(model, trainer.processing_class, config, plan, run, summary, weights)


def keep_model(
    model: Any,
    tokenizer: Any,
    config: Config,
    plan: PlacementPlan,
    run: RunFolder,
    summary: dict[str, Any],
    weights: dict[str, Any] | None = None,
) -> None:
    """Write the adapter (or the whole model), the tokenizer and the card."""
    target = run.adapter if config.method == "lora" else run.model
    model.config.use_cache = True
    model.save_pretrained(target, state_dict=weights)
    tokenizer.save_pretrained(target)
    (target / "README.md").write_text(model_card(config, plan, summary), encoding="utf-8")
