"""Answers prompts with a model, for people to read. Greedy, so that a difference is the training's doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.placement import PlacementPlan, move

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    plan: PlacementPlan,
    max_new_tokens: int,
) -> list[str]:
    """One answer per prompt, through the chat template that training uses."""
    import torch

    was_training = model.training
    model.eval()
    answers = []
    autocast = torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32")
    with torch.no_grad(), autocast:
        for prompt in prompts:
            ids: Any = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            ids = move(ids, plan)
            out = model.generate(
                **ids,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
            new = out[0, ids["input_ids"].shape[1] :]
            answers.append(str(tokenizer.decode(new, skip_special_tokens=True)).strip())
    model.train(was_training)
    return answers
