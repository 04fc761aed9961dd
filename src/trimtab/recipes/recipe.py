"""What a recipe is: everything in which one kind of training differs from another, in one frozen description.

The page that all of them share is `run.py`, the table of them `table.py`. A recipe's own file imports torch and a
trainer inside its functions alone, so that planning, cards and reports can read the table at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

from trimtab.config.schema import Config
from trimtab.config.section import RecipeSection
from trimtab.models.families import CAUSAL_LM, Family
from trimtab.placement import PlacementPlan, Workload
from trimtab.recipes.look import Look, prompt_answered, prompts_answered
from trimtab.recipes.preflight import Preflight
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.takes import Takes

if TYPE_CHECKING:
    from trimtab.fast.apply import Fast
    from trimtab.recipes.fullest_rows import Fullest

Say = Callable[[str], None]


def rows_at_once(config: Config, on_cpu: bool) -> Workload:
    """A step that pushes a batch of rows through the model, once: what most recipes do."""
    return Workload(
        batch_size=config.training.batch_size,
        max_length=config.data.max_length,
        gradient_checkpointing=config.training.gradient_checkpointing,
    )


class Need(NamedTuple):
    """What a run that found no memory left is told."""

    settings: Mapping[str, object]
    """The settings that the need grows with."""
    held: str
    """What had to lie in memory at once."""
    changes: Sequence[str]
    """The ways out, the best first."""


@dataclass(frozen=True)
class Prepared:
    """A run's data, ready to train on."""

    processor: Any
    """The tokenizer, or what a family has in its place; kept beside the weights."""
    train: Any
    eval: Any
    """None or empty where nothing is held out."""
    report: Any
    """How the data came about: `lines()` for people, `as_dict()` for data.json."""
    own: Any = None
    """What this recipe alone goes on with."""
    length: Callable[[Any], int] | None = None
    """How many tokens a trained row has, its pictures and clips expanded; None where other things decide how long the
    rows of a step are."""


@dataclass
class Job:
    """One run on its way: what was asked, where it goes, and what has been made for it so far."""

    config: Config
    plan: PlacementPlan
    run: RunFolder
    say: Say
    checkpoint: Path | None
    prepared: Prepared
    model: Any = None
    stage: Literal["before", "after"] = "before"
    """Which look is taken: at the untouched model, or at what was trained."""
    main: bool = True
    """Whether this process writes what a look keeps."""
    fast: Fast | None = None
    """What of the model computes faster than its own code."""


class Driver(Protocol):
    """What carries the steps out: a trainer of Hugging Face, or a loop of our own."""

    main: bool
    """Whether this process writes and speaks for all."""

    @property
    def ended_early(self) -> bool:
        """Whether the run was told to end before its last step, in all its processes alike."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...

    def open(self) -> None:
        """Begin to write to the run's folder, or refuse to go on there."""

    def together(self, doing: str) -> AbstractContextManager[None]:
        """Work that each process does by itself: what fails in one ends it in all."""

    def train(self) -> None:
        """Go on from the job's checkpoint or from the start, to the end or to an interrupt."""

    @property
    def steps(self) -> tuple[int, int]:
        """Whole steps that are done, and how many there are to be."""

    @property
    def model(self) -> Any:
        """The model as it stands, without what a trainer wraps around it."""

    def measure(self) -> dict[str, float]:
        """Figures of the model as it stands on what is held out, `loss` among them where there is one."""

    @property
    def skipped(self) -> int:
        """Steps that changed no weight, for numbers in them that were not finite."""

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What the monitor has warned of, each with its step, kind and message."""

    def settle(self) -> dict[str, Any] | None:
        """Put the weights to be kept into the model; gives those that had to be gathered. Every process calls it."""

    def part(self) -> None:
        """The run was interrupted and has written what it will."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One kind of training."""

    name: str
    """As `recipe:` in a config, and the name of its file."""
    settings: type[RecipeSection] | None = None
    """Its section of the settings, with its defaults and rules; None where the general ones are all."""
    words: Callable[[Config], str]
    """How its model card calls it."""
    workload: Callable[[Config, bool], Workload]
    """What one step pushes through the model, on the CPU or not; the plan is made for it."""
    need: Callable[[Config], Need]
    """What takes the memory, and what to change where there is too little."""
    prepare: Callable[[Config, PlacementPlan, Say], Prepared]
    """Reads, checks and tells the data; loads no weights."""
    build: Callable[[Job], Driver]
    """The driver, with the model placed."""
    outcome: Callable[[Job, Any], dict[str, Any]]
    """The summary's own figures, those before and after among them, once the kept weights are in the model."""
    family: Family = CAUSAL_LM
    """What kind of model it trains: how that is loaded, adapted and filed."""
    preflight: Callable[[Config, PlacementPlan], Preflight] | None = None
    """All that can be checked without weights; `trimtab plan` shows it."""
    prove: Callable[[Job], None] | None = None
    """What is tried with the weights before the trainer is built."""
    rewarded: bool = False
    """It generates and learns from rewards: its loss does not tell how good the answers are."""
    fit: Callable[[Config, Any], None] | None = None
    """What is done to the loaded model, weights or none, before its adapter is added."""
    asks: Callable[[Job], list[dict[str, Any]]] = lambda job: [
        {"prompt": prompt} for prompt in job.config.samples.prompts
    ]
    """What is asked before and after training, each as a sample tells it; `look` answers."""
    looked_at: Callable[[Config], dict[str, Any]] = lambda config: {
        "prompts": config.samples.prompts,
        "held_out": config.samples.held_out,
    }
    """The settings that say what is asked: where all are empty nothing is."""
    look: Callable[[Job, Any], Look] | None = prompts_answered
    """What the model answers; None where nothing is asked."""
    answer: Callable[[Config, PlacementPlan, Any, str, Sequence[Path]], str] | None = prompt_answered
    """One question, with pictures or none, to the model that a run kept; None where its models answer none."""
    again: Callable[[Config, Path], Config] = lambda config, folder: config
    """The settings by which a run in this folder is prepared again as it was: what was learned for it is there."""
    takes: Callable[[Job, Any, int], Takes] | None = None
    """So many trained and as many held-out rows, spoken, for `trimtab evaluate`; None where the model says nothing."""
    fast: frozenset[str] = frozenset({"adapters", "compile", "kernels"})
    """Which parts of the settings' `speed` it can use; what a trainer has to do itself (`head`, `padding`) it names."""
    fullest: Callable[[Config, int], Fullest] | None = None
    """So many rows as long as the settings let them be, made up: what a step is executed with to know its memory. None
    where a step cannot be executed without data."""
    captures: bool = False
    """Whether steps are captured as CUDA graphs, which need a stream of their own."""
