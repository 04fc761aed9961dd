"""The largest number that each setting takes where its declaration names none: beyond it no machine could do it.

A slip of the keyboard (a batch of 10**18 rows, a million workers) is refused with the setting's name before it costs
memory or time. Knows names and numbers; reads nothing.
"""

from __future__ import annotations

from typing import Any

MOST_WHOLE = 2**31 - 1
MOST = 1e12
_LARGEST: dict[str, int | float] = {
    "data.max_rows": 10**12,
    "data.max_length": 2**24,
    "lora.r": 2**16,
    "lora.alpha": 2**20,
    "training.epochs": 1e6,
    "training.max_steps": 10**12,
    "training.batch_size": 2**20,
    "training.eval_batch_size": 2**20,
    "training.gradient_accumulation_steps": 2**20,
    "training.effective_batch_size": 2**30,
    "training.learning_rate": 1e3,
    "training.weight_decay": 1e3,
    "training.dataloader_workers": 1024,
    "grpo.num_generations": 2**16,
    "grpo.temperature": 100,
    "grpo.max_prompt_length": 2**24,
    "grpo.max_completion_length": 2**24,
    "grpo.num_iterations": 2**16,
    "grpo.test_seconds": 86_400,
    "grpo.test_megabytes": 2**20,
    "zeroth.queries": 2**16,
    "zeroth.lanes": 2**16,
    "vision.answer_length": 2**20,
    "shirg.size": 2**16,
    "shirg.crop": 2**16,
    "shirg.keep": 2**24,
    "voice.min_seconds": 86_400,
    "voice.max_seconds": 86_400,
    "voice.temperature": 100,
    "processes": 2**16,
    "monitor.slow_after_seconds": 1e9,
    "monitor.stuck_after_seconds": 1e9,
    "samples.max_new_tokens": 2**20,
}


def with_limits(key: str, form: dict[str, Any]) -> dict[str, Any]:
    """A setting's JSON schema, with a bound on both sides wherever it takes numbers."""
    if "anyOf" in form:
        return {**form, "anyOf": [with_limits(key, one) for one in form["anyOf"]]}
    if form.get("type") not in ("integer", "number"):
        return form
    usual = MOST_WHOLE if form["type"] == "integer" else MOST
    added: dict[str, Any] = {}
    if not {"maximum", "exclusiveMaximum"} & form.keys():
        added["maximum"] = _LARGEST.get(key, usual)
    if not {"minimum", "exclusiveMinimum"} & form.keys():
        added["minimum"] = -_LARGEST.get(key, usual)
    return form | added
