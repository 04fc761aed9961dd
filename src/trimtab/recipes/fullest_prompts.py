"""Prompts as long as a GRPO run lets them be, and completions of full length, for steps that are executed by shapes.

There is no tokenizer and no data: prompts are made of one word, and any reward is as good as another. A generation is
executed where it holds most: the prompts as they are, and the last tokens with all keys and values before them. It
changes the process that it is called in for good (trial_step.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trimtab.config.facts import longest_prompt
from trimtab.config.schema import Config
from trimtab.recipes.fullest_rows import Fullest, NotExecuted
from trimtab.recipes.preflight import Preflight
from trimtab.recipes.recipe import Prepared

CHUNK = 64
"""Tokens that go through the model at once where a real generation takes them one by one: no more than a prompt's."""
_LAST = 2
"""Tokens at the end of a completion that are generated one by one."""


def prompt_rows(config: Config, number: int) -> Fullest:
    """So many prompts, all of `longest_prompt`, each with a reward to come."""
    if config.grpo.use_vllm:
        raise NotExecuted("vLLM generates, and what it holds is its own to say (grpo.vllm_memory)")
    import datasets

    from trimtab.rewards.check import CheckedReward
    from trimtab.rewards.load import Rewards

    length = longest_prompt(config)
    rows = datasets.Dataset.from_list([{"prompt": " ".join(["word"] * length)}] * number)
    reward = CheckedReward("length", _any_reward, may_skip=False)
    own = Preflight(rewards=Rewards([reward], [1.0], {"length": ()}))
    _generate_the_ends()
    size, generated = config.training.batch_size, config.grpo.max_completion_length
    told = f"{size} completion{'s' * (size > 1)} of {generated:,} tokens to prompts of {length:,}"
    return Fullest(Prepared(_tokenizer(), rows, None, None, own=own), told)


def _any_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float(place % 2) for place in range(len(completions))]


def _tokenizer() -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "word": 1, "<end>": 2}, unk_token="word"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="word"
    )


def _generate_the_ends() -> None:
    """Have `generate` skip what lies between its first tokens and its last, which holds less than these do."""
    from transformers import GenerationMixin

    real: Any = GenerationMixin.generate

    def generate(
        model: Any, *, input_ids: Any, attention_mask: Any, generation_config: Any, **more: Any
    ) -> Any:
        import torch

        def some(ids: Any, mask: Any, **changed: Any) -> Any:
            settings = copy.deepcopy(generation_config)
            settings.update(max_new_tokens=_LAST, **changed)
            return real(model, input_ids=ids, attention_mask=mask, generation_config=settings, **more)

        tokens = generation_config.max_new_tokens
        between = tokens - _LAST
        if between <= 0:
            with _counted(model, 1.0, 1.0, input_ids.shape[1]):
                return real(
                    model,
                    input_ids=input_ids,
                    attention_mask=attention_mask,
                    generation_config=generation_config,
                    **more,
                )
        # What the first token takes after the prompt and what the last one takes stand for half of them each.
        each = (tokens - 1) / 2
        with _counted(model, 1.0, each, input_ids.shape[1]):
            some(input_ids, attention_mask)
        size = (input_ids.shape[0], between)
        ids = torch.cat([input_ids, input_ids.new_ones(size)], dim=1)
        mask = torch.cat([attention_mask, attention_mask.new_ones(size)], dim=1)
        with _counted(model, 0.0, each, ids.shape[1]):
            return some(ids, mask, prefill_chunk_size=min(CHUNK, input_ids.shape[1]))

    GenerationMixin.generate = generate  # type: ignore[method-assign, assignment]


@contextmanager
def _counted(model: Any, prompts: float, tokens: float, given: int) -> Iterator[None]:
    """Where kernels are counted: how many passes over prompts, and over a token behind them, each of these stands for.

    `given` tokens are the prompt: a pass over a single one of them is none over a token that was generated.
    """
    from trimtab.virtual import work

    tally = work.listening()
    if tally is None:
        yield
        return

    passed = 0

    def entering(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal passed
        passed += kwargs["input_ids"].shape[1]
        # It holds until the next pass: choosing a token belongs to the pass before it.
        tally.times = tokens if passed > given else prompts

    hook = model.register_forward_pre_hook(entering, with_kwargs=True)
    try:
        with tally.standing_for("generate", prompts):
            yield
    finally:
        hook.remove()
