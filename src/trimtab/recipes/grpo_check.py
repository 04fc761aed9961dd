"""Everything about a GRPO run that can be known before its first step, in one report.

`trimtab plan` shows it without weights; `trimtab train` adds a dry generation. A report with a cross ends the run
before it has cost anything; nothing is repaired or lowered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

from trimtab.config import Config
from trimtab.config.facts import longest_prompt
from trimtab.config.problems import without_secrets
from trimtab.data.prompts import PromptData, prepare_prompts
from trimtab.data.render import prompt_ids
from trimtab.errors import RequestError, TrimtabError
from trimtab.models import load_model_config, load_tokenizer
from trimtab.models.sample import continued
from trimtab.monitor.wording import count_of
from trimtab.placement import Check, PlacementPlan
from trimtab.recipes.preflight import Preflight
from trimtab.recipes.vllm_server import server_fault
from trimtab.rewards import Rewards, load_rewards
from trimtab.rewards.builtin import final_answer
from trimtab.rewards.promises import what_it_keeps

GIB = 2**30
DRY_TOKENS = 8


def preflight(config: Config, plan: PlacementPlan) -> Preflight:
    """All checks that need no weights."""
    checks: list[Check] = []
    tokenizer = load_tokenizer(config.model)
    data: PromptData | None = None
    rewards: Rewards | None = None
    try:
        data = prepare_prompts(config, tokenizer)
        checks.append(Check("data", True, f"{count_of(len(data.train), 'prompt')}, {data.report.asked}"))
    except RequestError as error:
        checks.append(Check("data", False, _indented(error)))
    checks.append(_batch(config, plan, data))
    checks.append(_lengths(config, data))
    checks += _memory(plan)
    try:
        rewards = load_rewards(config)
    except RequestError as error:
        checks.append(Check("rewards", False, _indented(error)))
    if rewards is not None and data is not None:
        checks += _rewards(rewards, data)
    if "code" in (rewards.columns if rewards is not None else {}):
        checks.append(Check("sandbox", *what_it_keeps(config.grpo)))
    if config.grpo.use_vllm:
        checks.append(_vllm(config, plan))
    return Preflight(checks, tokenizer, data, rewards)


def dry_generation(model: Any, plan: PlacementPlan, report: Preflight, config: Config) -> Check:
    """A few tokens for the first prompt, on the plan's devices, scored by every reward."""
    assert report.data is not None
    assert report.rewards is not None
    row, tokenizer = report.data.train[0], report.processor
    most = min(DRY_TOKENS, config.grpo.max_completion_length)
    (new,) = continued(model, tokenizer, [prompt_ids(tokenizer, row["prompt"])], plan, most)
    completion = tokenizer.decode(new, skip_special_tokens=True)
    try:
        scores = score(report.rewards, row, [completion], [new])
    except TrimtabError as error:
        return Check("generation", False, _indented(error))
    return Check("generation", True, f"{len(new)} tokens on {plan.device}: {completion!r}, {scores}")


def score(
    rewards: Rewards, row: dict[str, Any], completions: Sequence[str], ids: Sequence[Sequence[int]]
) -> str:
    """What every reward gives for completions of one row."""
    count = len(completions)
    prompts = [row["prompt"]] * count
    answers: list[Any] = list(completions)
    if not isinstance(row["prompt"], str):
        answers = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
    extras = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    given = []
    for reward in rewards.functions:
        values = reward(prompts, answers, completion_ids=list(ids), **columns, **extras)
        given.append(f"{reward.__name__} {', '.join('none' if v is None else f'{v:g}' for v in values)}")
    return "; ".join(given)


def _ignore(*_: Any) -> None:
    return None


def _batch(config: Config, plan: PlacementPlan, data: PromptData | None) -> Check:
    training, number = config.training, config.grpo.num_generations
    total = training.batch_size * training.gradient_accumulation_steps * plan.processes
    sum_shown = (
        f"training.batch_size {training.batch_size} × accumulation {training.gradient_accumulation_steps} × "
        f"{plan.processes} process{'es' * (plan.processes > 1)} = {total} completions a step"
    )
    if total % number:
        return Check(
            "batch",
            False,
            f"{sum_shown}, which grpo.num_generations {number} does not divide: the completions of a prompt are "
            f"compared within a step; set training.batch_size to a multiple of {number}, or another "
            "gradient_accumulation_steps",
        )
    prompts = total // number
    if data is not None and prompts > len(data.train):
        return Check(
            "batch",
            False,
            f"{sum_shown} = {count_of(prompts, 'prompt')}, and there are {len(data.train)}: not one step would be "
            "made; lower training.batch_size, or give more rows",
        )
    held = data.eval if data is not None else None
    size = (training.eval_batch_size or training.batch_size) * plan.processes
    if held is not None and size % number:
        return Check(
            "batch",
            False,
            f"evaluation takes {size} completions at a time, which grpo.num_generations {number} does not divide; "
            f"set training.eval_batch_size to a multiple of {number}",
        )
    return Check("batch", True, f"{sum_shown} = {count_of(prompts, 'prompt')} × {number} generations")


def model_context(config: Config) -> int | None:
    """The most tokens that the model takes, where its config tells."""
    text = load_model_config(config.model).get_text_config()
    return getattr(text, "max_position_embeddings", None)


def _lengths(config: Config, data: PromptData | None) -> Check:
    context = model_context(config)
    sizes = data.report.tokens if data is not None else None
    longest = sizes.max if sizes is not None else longest_prompt(config)
    completion = config.grpo.max_completion_length
    told = f"prompts up to {longest} + completions up to {completion} = {longest + completion} tokens"
    if context is not None and longest + completion > context:
        return Check(
            "lengths",
            False,
            f"{told}, and the model's context is {context}; lower grpo.max_completion_length or "
            "grpo.max_prompt_length",
        )
    return Check("lengths", True, f"{told}, in a context of {context or 'unknown length'}")


def _memory(plan: PlacementPlan) -> list[Check]:
    checks = []
    for device, share in plan.memory.items():
        amount = f"{share.needed / GIB:.2f} GiB of {share.capacity / GIB:.1f} GiB"
        told = f"{device}: {amount} (executed)" if share.executed else f"{device}: about {amount} (estimate)"
        if share.reserved:
            told += f", {share.reserved / GIB:.2f} GiB of it for vLLM (grpo.vllm_memory)"
        if share.cache:
            told += f", {share.cache / GIB:.2f} GiB of it for the cache while generating"
        # The plan has refused already what it refuses. The CPU can borrow from the disk, and a rehearsal shows what a
        # step takes: there a lack by the estimate is told.
        refused = share.executed and plan.kind != "cpu"
        checks.append(Check("memory", True if share.fits else False if refused else None, told))
    return checks


def _rewards(rewards: Rewards, data: PromptData) -> list[Check]:
    row = data.train[0]
    missing = rewards.missing([name for name in row if name != "prompt"])
    if missing:
        change = (
            "set grpo.answer_column or grpo.tests_column, or give the function such a parameter a default"
        )
        return [Check("rewards", False, f"{line}; {change}") for line in missing]
    gaps = _gaps(rewards, data)
    if gaps:
        return [Check("rewards", False, line) for line in gaps]
    # Two completions of one row, so that a reward which gives one number for all is found out.
    texts = [_likely(row), ""]
    try:
        scores = score(rewards, row, texts, [[0] * 8, []])
    except TrimtabError as error:
        return [Check("rewards", False, _indented(error))]
    return [Check("rewards", True, f"on {texts[0][-40:]!r} and an empty completion: {scores}")]


def _gaps(rewards: Rewards, data: PromptData) -> list[str]:
    """Rows that a built-in reward cannot judge; it would stop the run when it came to the first of them."""
    lines = []
    parts = {"prompts to train on": data.train, "held-out prompts": data.eval}
    for (name, columns), (what, rows) in product(rewards.columns.items(), parts.items()):
        for column in columns if rows is not None else ():
            empty = sum(value is None or value == [] or not str(value).strip() for value in rows[column])
            if empty:
                lines.append(
                    f"{name} reads {column}, in which {empty:,} of {len(rows):,} {what} have nothing; "
                    "fill it in, or remove those rows"
                )
    return lines


def _likely(row: dict[str, Any]) -> str:
    """A completion that a person would give for the row, where it has one."""
    for name in ("answer", "completion", "output", "solution", "response"):
        if isinstance(row.get(name), str | int | float):
            text = str(row[name])
            return text if final_answer(text) is not None else f"#### {text}"
    return "a completion"


def _vllm(config: Config, plan: PlacementPlan) -> Check:
    grpo = config.grpo
    colocate = grpo.vllm_mode == "colocate"
    if plan.kind != "cuda":
        told = f"vLLM generates on CUDA, and the run is on {plan.device}; set grpo.use_vllm=false"
        return Check("vllm", False, told)
    if find_spec("vllm") is None:
        told = "not installed: `pip install 'trimtab[vllm]'`, or set grpo.use_vllm=false"
        return Check("vllm", False, told)
    if grpo.loss_type == "vespo":
        told = "TRL's vespo corrects for vLLM by token, and its default is by sequence; set another grpo.loss_type"
        return Check("vllm", False, f"{told}, or grpo.use_vllm=false")
    if not colocate:
        fault = server_fault(grpo.vllm_server_base_url)
        return Check(
            "vllm", fault is None, fault or f"generates on {grpo.vllm_server_base_url}, which answers"
        )
    if plan.strategy == "split":
        told = "shares the GPUs with a model that the plan splits over all of them; set grpo.vllm_mode=server"
        return Check("vllm", False, f"{told} with a GPU of its own, or grpo.use_vllm=false")
    taken = f"takes {grpo.vllm_memory:.0%} of each GPU (grpo.vllm_memory)"
    return Check("vllm", True, f"{taken}, which the plan counts")


def _indented(error: Exception) -> str:
    return without_secrets(str(error)).replace("\n", "\n      ")
