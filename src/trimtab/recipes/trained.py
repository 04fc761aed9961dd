"""What recipes do around a Hugging Face trainer: answers to read before and after, and keeping the result."""

from __future__ import annotations

from typing import Any

from trimtab.config import Config
from trimtab.models.sample import answer
from trimtab.placement import PlacementPlan
from trimtab.recipes.card import model_card
from trimtab.recipes.run_folder import RunFolder


def first_answers(
    trainer: Any, config: Config, plan: PlacementPlan, run: RunFolder, *, resumed: bool
) -> list[str]:
    """Answers before the first step; a resumed run reads those of its first start."""
    if resumed and (run.path / "baseline.json").is_file():
        kept: list[str] = run.read_json("baseline.json")["answers"]
        return kept
    answers = sample_answers(trainer, config, plan)
    if trainer.args.process_index == 0:
        run.write_json("baseline.json", {"answers": answers})
    return answers


def sample_answers(trainer: Any, config: Config, plan: PlacementPlan) -> list[str]:
    if plan.strategy == "sharded":
        # No process holds the whole model, so none can answer by itself.
        return ["(not sampled: the model is sharded)"] * len(config.samples.prompts)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return answer(
        model, trainer.processing_class, config.samples.prompts, plan, config.samples.max_new_tokens
    )


def keep(trainer: Any, config: Config, plan: PlacementPlan, run: RunFolder, summary: dict[str, Any]) -> None:
    """Write the adapter (or the whole model), the tokenizer and the card."""
    target = run.adapter if config.method == "lora" else run.model
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Gathering a sharded model is collective: every process takes part, one writes.
    weights = trainer.accelerator.get_state_dict(trainer.model) if plan.strategy == "sharded" else None
    if trainer.args.process_index != 0:
        return
    model.config.use_cache = True
    model.save_pretrained(target, state_dict=weights)
    trainer.processing_class.save_pretrained(target)
    (target / "README.md").write_text(model_card(config, plan, summary), encoding="utf-8")
