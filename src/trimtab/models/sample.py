"""Answers prompts with a model, for people to read. Greedy, so that a difference is the training's doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.data.render import opening_ids
from trimtab.placement import PlacementPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A user's message as training rendered it: through the chat template, opened as the tokenizer opens a text."""
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    opening = opening_ids(tokenizer)
    return ids if ids[: len(opening)] == opening else opening + ids


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
            ids = torch.tensor([prompt_ids(tokenizer, prompt)], device=plan.device)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
            new = out[0, ids.shape[1] :]
            answers.append(str(tokenizer.decode(new, skip_special_tokens=True)).strip())
    model.train(was_training)
    return answers
