"""Writes the model card that goes with an adapter: what it is, what it was made from, what was measured."""

from __future__ import annotations

from typing import Any

import trimtab
from trimtab.config.schema import Config
from trimtab.models import builtin, tiny_vision, tiny_voice
from trimtab.placement import PlacementPlan
from trimtab.recipes.table import recipe_of

_FROM_NOISE = (tiny_vision.NAME, tiny_voice.NAME)


def model_card(config: Config, plan: PlacementPlan, summary: dict[str, Any]) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    base = "HuggingFaceTB/SmolLM2-135M-Instruct" if config.model.name == builtin.NAME else config.model.name
    kind = "LoRA adapter" if config.method == "lora" else "model"
    lines = [
        "---",
        # The hub knows no model by the names of the built-in ones that start from noise.
        *([] if config.model.name in _FROM_NOISE else [f"base_model: {base}"]),
        f"library_name: {'peft' if config.method == 'lora' else 'transformers'}",
        f"pipeline_tag: {recipe_of(config).family.pipeline_tag}",
        f"tags: [trimtab, {config.recipe}]",
        "---",
        "",
        f"# {base.split('/')[-1]}: {kind} by {recipe_of(config).words(config)}",
        "",
        f"Made with Trimtab {trimtab.__version__}; `config.yaml` and `plan.json` beside this folder tell the rest.",
        "",
    ]
    if config.model.name == builtin.NAME:
        lines += [
            "The base weights are a dequantised copy of a 4-bit (Q4_1) file, not the original checkpoint"
            + (
                ": use this adapter with that copy (`model.name: smollm2` in Trimtab)."
                if config.method == "lora"
                else "."
            ),
            "",
        ]
    if config.model.name in _FROM_NOISE:
        lines += [
            f"The base weights were random numbers from a seed (`model.name: {config.model.name}` in Trimtab): all "
            "that it knows it learned in this run.",
            "",
        ]
    lines += ["| | |", "|---|---|", f"| data | {config.data.source} |"]
    lines += [f"| rows | {summary['train_rows']:,} trained, {summary['eval_rows']:,} held out |"]
    if config.method == "lora":
        lines += [f"| LoRA | r {config.lora.r}, alpha {config.lora.alpha}, targets {config.lora.targets} |"]
    training = config.training
    lines += [
        f"| steps | {summary['steps']:,} of batch {training.batch_size} × {training.gradient_accumulation_steps} "
        f"× {plan.processes} process{'es' * (plan.processes > 1)} |",
        f"| learning rate | {training.learning_rate:g}, {training.lr_scheduler} |",
        f"| placement | {plan.strategy} on {', '.join(plan.devices)}, {plan.precision}{_held(config)} |",
    ]
    loss = summary.get("eval_loss") or {}
    if loss.get("before") is not None and loss.get("after") is not None:
        lines += [f"| held-out loss | {loss['before']:.4f} before, {loss['after']:.4f} after |"]
    for name, value in summary.get("metrics", {}).items():
        lines += [f"| {name} | {value['before']:.4f} before, {value['after']:.4f} after |"]
    for sample in summary.get("samples", []):
        lines += [
            "",
            f"**{sample['prompt']}**",
            "",
            *([f"- expected: {sample['expected']}"] if "expected" in sample else []),
            f"- before: {sample['before']}",
            f"- after: {sample['after']}",
        ]
    return "\n".join(lines) + "\n"


def _held(config: Config) -> str:
    return ", base weights in four bits (NF4) while it was trained" if config.model.quantize else ""
