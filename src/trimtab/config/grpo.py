"""The settings of `recipe: grpo`, its defaults, and what must hold between them and the others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from trimtab.config.rule import Conflict, Rules
from trimtab.config.section import Default, RecipeSection

if TYPE_CHECKING:
    from trimtab.config.schema import Config

RULES = Rules()
REWARDS = ("answer", "format", "length", "json", "code")
"""The rewards that Trimtab brings; all others are `module:function`."""
ANSWER_RULE = "Solve the problem. End with a line of the form: #### N, where N is the answer."


class GrpoSettings(RecipeSection):
    """Reinforcement learning on rewards that are computed from completions; used with `recipe: grpo`."""

    recipe = "grpo"
    without_effect = (
        *("data.format", "data.packing", "data.train_on"),
        *("training.group_by_length", "samples.held_out"),
    )
    addresses: ClassVar[dict[str, str]] = {
        "vllm_server_base_url": "leave only the address here; a login for it goes into ~/.netrc (or the file that the "
        "environment variable NETRC names)"
    }
    rules = RULES

    reward: str | list[str] | dict[str, float] | None = None
    """What completions are scored by: `answer`, `format`, `length`, `json`, `code`, or `module:function`; one name, a
    list, or a mapping of names to weights."""

    chat: bool = True
    """A prompt that is text is put as a user's message through the chat template; false continues it as it stands."""

    system: str | None = None
    """A system message before each prompt that is text."""

    prompt: str | None = None
    """The prompt as a template over columns, `"{question} End with #### N."`; null takes the prompt column."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions for each prompt; they are judged against one another."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens; 0 from all."""

    max_prompt_length: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt in tokens; null takes what `data.max_length` leaves beside the completion. What is longer is
    dropped and counted."""

    max_completion_length: Annotated[int, Field(ge=1)] = 256
    """Longest completion in tokens."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term that holds the model near its start; 0 needs no reference."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """How the loss of tokens is gathered, by the name that TRL gives it."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """How far a token's probability may move before its gain is clipped."""

    num_iterations: Annotated[int, Field(ge=1)] = 1
    """Optimizer passes over each set of completions."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What rewards are divided by: the spread of the prompt's completions, of the batch, or nothing."""

    mask_truncated: bool = False
    """Leave completions that reached `max_completion_length` out of the loss."""

    show_completions: Annotated[int, Field(ge=0)] = 1
    """Completions shown, and kept in metrics.jsonl, with each line of metrics."""

    use_vllm: bool = False
    """Generate with vLLM (an extra, for CUDA)."""

    vllm_mode: Literal["colocate", "server"] = "colocate"
    """vLLM inside the training processes, or a server of your own (docs/grpo.md says what it is started with)."""

    vllm_server_base_url: Annotated[str, Field(min_length=1)] = "http://localhost:8000"
    """Where the server of `vllm_mode: server` answers."""

    vllm_memory: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of a GPU's memory that vLLM takes when it shares the GPU."""

    answer_column: str = "answer"
    """Reward `answer`: the column with the right answer, as it stands or after `####`."""

    pattern: str | None = None
    """Reward `format`: the regular expression that a whole completion has to match."""

    target_length: Annotated[int, Field(ge=1)] = 32
    """Reward `length`: tokens up to which a completion counts as short."""

    tests_column: str = "tests"
    """Reward `code`: the column with unit tests, as Python text or a list of assertions."""

    test_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Reward `code`: time for one completion's tests."""

    test_megabytes: Annotated[int, Field(ge=64)] = 512
    """Reward `code`: memory for one completion's tests."""

    unfenced: bool = False
    """Reward `code`: run completions also where this machine cannot keep your files from them."""

    @property
    def through_chat_template(self) -> bool:
        return self.chat

    def defaults(self, config: Config) -> list[Default]:
        lora = config.method == "lora"
        what = "a LoRA adapter" if lora else "all weights"
        unsaid = self.chat and self.prompt is None and "answer" in reward_weights(config)
        why = "the reward `answer` reads what follows ####, so the model is told to write it"
        by_epochs = config.training.max_steps is None
        return [
            *([Default("grpo.system", ANSWER_RULE, why)] if unsaid else []),
            Default("training.batch_size", self.num_generations, "completions a pass: those of one prompt"),
            Default("training.learning_rate", 1e-5 if lora else 1e-6, f"usual for GRPO over {what}"),
            Default("training.lr_scheduler", "constant", "usual for GRPO"),
            *([Default("training.epochs", 1.0, "each prompt is answered once")] if by_epochs else []),
            Default(
                "data.eval_fraction", 0.0, "an evaluation generates for every held-out prompt; by request"
            ),
        ]


def reward_weights(config: Config) -> dict[str, float]:
    """The rewards by name, each with its weight."""
    reward = config.grpo.reward
    if isinstance(reward, dict):
        return reward
    names = [reward] if isinstance(reward, str) else reward or []
    return dict.fromkeys(names, 1.0)


@RULES.reading("grpo.reward", "grpo.pattern")
def _nothing_to_reward(config: Config) -> Conflict | None:
    names = [*reward_weights(config)]
    if not names:
        return Conflict(
            "grpo.reward",
            "recipe: grpo learns from rewards, and nothing says which",
            "set reward: answer (or format, length, json, code, my_module:my_function; several as a list)",
        )
    unknown = [name for name in names if name not in REWARDS and ":" not in name]
    if unknown:
        return Conflict(
            "grpo.reward",
            f"has {unknown[0]!r}, which is no reward",
            f"write one of {', '.join(REWARDS)}, or module:function",
        )
    if "format" not in names:
        return None
    try:
        broken = "is not set" if config.grpo.pattern is None else ""
        re.compile(config.grpo.pattern or "")
    except re.error as error:
        broken = f"is no regular expression: {error}"
    if not broken:
        return None
    return Conflict("grpo.pattern", f"{broken}; the reward `format` needs it", "write e.g. '#### -?[0-9]+'")


RULES.blame(
    "grpo.max_completion_length grpo.max_prompt_length data.max_length",
    lambda c: c.grpo.max_prompt_length is None and c.grpo.max_completion_length >= c.data.max_length,
    "takes all of the tokens of data.max_length, which a prompt and its completion share: none is left for a prompt",
    "raise data.max_length, lower grpo.max_completion_length, or set grpo.max_prompt_length",
)
RULES.blame(
    "grpo.use_vllm grpo.vllm_mode model_parallel",
    lambda c: c.grpo.use_vllm and c.grpo.vllm_mode == "colocate" and c.model_parallel,
    "shares the GPUs with a split model: vLLM would take memory that the split has given to layers",
    "set grpo.vllm_mode: server with a GPU of its own, or model_parallel: false",
)


@RULES.reading("grpo.use_vllm", "grpo.vllm_mode", "grpo.vllm_server_base_url")
def _vllm_address(config: Config) -> Conflict | None:
    grpo, key = config.grpo, "grpo.vllm_server_base_url"
    if grpo.vllm_server_base_url == type(grpo)().vllm_server_base_url:
        return None
    if not (grpo.use_vllm and grpo.vllm_mode == "server"):
        change = "remove it, or set grpo.use_vllm: true and grpo.vllm_mode: server"
        return Conflict(key, "has no effect: no vLLM server generates", change, warning=True)
    if re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", grpo.vllm_server_base_url):
        return None
    return Conflict(key, "is not the address of a server", "write e.g. http://localhost:8000")
