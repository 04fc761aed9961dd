"""The settings of `recipe: zeroth_order`, its defaults, and what must hold between them and the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from trimtab.config.facts import unused
from trimtab.config.rule import Conflict, Rules
from trimtab.config.section import Default, RecipeSection

if TYPE_CHECKING:
    from trimtab.config.schema import Config

RULES = Rules()
# A label may be written as it stands in the data: 0, true, entailment.
Label = Annotated[str, BeforeValidator(lambda key: str(key) if isinstance(key, bool | int | float) else key)]


class ZerothSettings(RecipeSection):
    """Steps from forward passes alone, on a task with given answers; used with `recipe: zeroth_order`."""

    recipe = "zeroth_order"
    without_effect = (
        *(
            "data.format",
            "data.packing",
            "data.train_on",
            "lora.dropout",
            "samples.prompts",
            "samples.held_out",
        ),
        *("training.max_grad_norm", "training.optimizer", "training.gradient_checkpointing"),
        *("training.group_by_length", "training.dataloader_workers", "monitor.report_to"),
        *("speed.adapters", "speed.head", "speed.compile", "speed.padding", "speed.kernels"),
        "speed.activation_memory_budget",
    )
    rules = RULES

    method: Literal["mezo", "dizo", "fzoo"] = "dizo"
    """MeZO; DiZO: MeZO that also rescales how far chosen layers have moved; FZOO: several one-sided passes a step."""

    task: str | None = None
    """A known task such as `sst2`: it brings its prompt, its answers and its metrics."""

    template: str | None = None
    """The prompt for data of your own, with columns in braces: `"{sentence} It was"`."""

    labels: dict[Label, str] = Field(default_factory=dict)
    """What the model should say for each value of `label_column`: `{0: " terrible", 1: " great"}`."""

    label_column: str = "label"
    """The column that holds the label."""

    answer: str | None = None
    """In place of `labels`: the answer to be learned, with columns in braces: `" {answer}"`."""

    eps: Annotated[float, Field(gt=0)] | None = None
    """How far weights are perturbed; null takes the usual value of the method."""

    queries: Annotated[int, Field(ge=2)] = 8
    """FZOO: perturbations in one step."""

    lanes: Annotated[int, Field(ge=1)] | None = None
    """Passes that are stacked into one forward; null: one on the CPU, on a GPU two, or all of an adapter's."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of weights in bf16 or fp16: up or down by chance, right in the mean; to the nearest, small steps are lost."""

    interval: Annotated[int, Field(ge=1)] = 50
    """DiZO: steps between two projections."""

    projection_eps: Annotated[float, Field(gt=0)] = 0.1
    """DiZO: how far a layer's ratio is perturbed."""

    projection_step: Annotated[float, Field(gt=0)] = 2.0
    """DiZO: step size of the ratios."""

    projection_clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """DiZO: a ratio stays within 1 plus or minus this in one projection."""

    projection_iterations: Annotated[int, Field(ge=1)] = 10
    """DiZO: search steps in one projection, two passes each."""

    projection_roles: list[str] = Field(default_factory=lambda: ["query", "value"])
    """DiZO: which layers are projected, by their role in attention."""

    @property
    def through_chat_template(self) -> bool:
        return False

    def defaults(self, config: Config) -> list[Default]:
        lora = config.method == "lora"
        what = "a LoRA adapter" if lora else "all weights"
        if self.method == "fzoo":
            rate, eps = (1e-3, 1e-2) if lora else (5e-5, 1e-4)
            source = f"FZOO's steps over {what} have a length of their own"
        else:
            rate, eps = (1e-4, 1e-2) if lora else (1e-6, 1e-3)
            source = f"usual for MeZO over {what}"
        sample = "the few rows that Trimtab ships for each task; `hub` takes the real set"
        return [
            *([Default("data.source", "sample", sample)] if self.task is not None else []),
            Default("training.learning_rate", rate, source),
            Default("zeroth.eps", eps, source),
            Default("training.lr_scheduler", "constant", "usual for zeroth-order steps"),
            Default("training.batch_size", 16, "usual for zeroth-order steps, which keep no activations"),
        ]


@RULES.reading("zeroth.task", "zeroth.template", "zeroth.labels", "zeroth.answer")
def _nothing_to_score(config: Config) -> Conflict | None:
    zeroth = config.zeroth
    own = "zeroth.template with zeroth.labels or zeroth.answer"
    if zeroth.task is None and zeroth.template is None:
        return Conflict(
            "zeroth.task",
            "recipe: zeroth_order scores answers, and nothing says which",
            f"set zeroth.task (e.g. sst2), or {own}",
        )
    if zeroth.task is not None and (
        zeroth.template is not None or zeroth.labels or zeroth.answer is not None
    ):
        return Conflict("zeroth.task", "brings its own prompt and answers", f"remove it, or remove {own}")
    if zeroth.template is not None and bool(zeroth.labels) == (zeroth.answer is not None):
        have = "both zeroth.labels and zeroth.answer" if zeroth.labels else "no answers"
        return Conflict("zeroth.template", f"stands with {have}", f"write {own}, one of the two")
    if len(set(zeroth.labels.values())) < len(zeroth.labels) or len(zeroth.labels) == 1:
        return Conflict(
            "zeroth.labels",
            "must give at least two labels, each its own text",
            "give each label another text",
        )
    return None


RULES.blame(
    "training.lr_scheduler",
    lambda c: c.training.lr_scheduler == "polynomial",
    "is not among zeroth-order schedules",
    "set it to linear",
)
RULES.blame(
    "sharding",
    lambda c: c.sharding,
    "cannot go with recipe: zeroth_order: each process computes with whole weights",
    "remove it; model_parallel: true splits a large model over the GPUs of one process",
)
_OF_OTHER_METHODS = {
    "mezo": ("queries", "interval", "projection_"),
    "dizo": ("queries",),
    "fzoo": ("interval", "projection_"),
}


@RULES.reading("zeroth.method")
def _unused_by_the_method(config: Config) -> Conflict | None:
    method = config.zeroth.method
    leaves = [leaf for leaf in ZerothSettings.model_fields if leaf.startswith(_OF_OTHER_METHODS[method])]
    return unused(config, [f"zeroth.{leaf}" for leaf in leaves], f"zeroth.method: {method}")
