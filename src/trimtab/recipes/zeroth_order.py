"""Zeroth-order fine-tuning (MeZO, DiZO, FZOO) on questions with given answers, in a loop of our own.

No gradient is ever computed. Weights change in one place only, the optimizer's update; evaluations, checkpoints and
perturbed passes leave every bit as it was. Of several processes each takes its own micro-batches, and they exchange
losses alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.config import schema
from trimtab.config.schema import Config
from trimtab.data.tasks import Question, Task
from trimtab.errors import RequestError
from trimtab.manifest import Part
from trimtab.placement import PlacementPlan, Workload
from trimtab.recipes.fullest_rows import scored_rows
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say

if TYPE_CHECKING:
    from trimtab.recipes.loop_driver import LoopDriver
    from trimtab.zeroth.objective import Example
    from trimtab.zeroth.optimizer import StepResult, ZerothOrder
    from trimtab.zeroth.settings import ZerothSettings

TRAJECTORY = "trajectory.bin"
SAME_NAMES = {
    *("method", "eps", "queries", "interval", "lanes", "rounding"),
    *("projection_eps", "projection_step", "projection_clip", "projection_iterations"),
}
"""Settings that the optimizer has by the same name."""
COMPILE_FROM = 5000
"""Steps from which a model on a GPU is compiled before its passes are captured."""


class Asked(NamedTuple):
    """The held-out questions, one for each example that was kept of them."""

    questions: list[Question]
    task: Task | None


def _workload(config: Config, on_cpu: bool) -> Workload:
    zeroth = config.zeroth
    passes = zeroth.queries + 1 if zeroth.method == "fzoo" else 2
    # As the optimizer chooses by itself.
    by_default = 1 if on_cpu else passes if config.method == "lora" else 2
    return Workload(
        batch_size=config.training.batch_size,
        max_length=config.data.max_length,
        gradient_checkpointing=config.training.gradient_checkpointing,
        training=False,
        lanes=min(zeroth.lanes or by_default, passes),
        anchors=zeroth.method == "dizo",
    )


def _need(config: Config) -> Need:
    return Need(
        {"training.batch_size": config.training.batch_size, "data.max_length": config.data.max_length},
        "weights and the passes of one step",
        [
            "set zeroth.lanes=1",
            "halve training.batch_size and double training.gradient_accumulation_steps",
            "lower data.max_length",
        ],
    )


def _prepare(config: Config, plan: PlacementPlan, say: Say) -> Prepared:
    from trimtab.data.scored import prepare_scored
    from trimtab.models import load_tokenizer

    tokenizer: Any = load_tokenizer(config.model)
    data = prepare_scored(config)
    for line in data.report.lines():
        say(line)
    answer_alone = data.task is not None and data.task.train_on == "answer"
    examples, _ = encode_all(tokenizer, data.train, config, say, gold_alone=answer_alone)
    held_out, questions = encode_all(tokenizer, data.eval, config, say)
    return Prepared(tokenizer, examples, held_out, data.report, own=Asked(questions, data.task))


def _build(job: Job) -> LoopDriver:
    from trimtab.recipes.loop_driver import LoopDriver

    engine = ZerothEngine(job)
    for line in engine.optimizer.describe():
        job.say(line)
    return LoopDriver(job, engine)


class ZerothEngine:
    """Steps of a zeroth-order optimizer over batches of questions: a recipe's own part of the loop."""

    def __init__(self, job: Job) -> None:
        from trimtab.models.load import shapes_only
        from trimtab.recipes.rehearsed_rows import HeaviestEarly, heaviest
        from trimtab.recipes.row_order import FEW, FEW_STEPS, HEAVIEST_FIRST
        from trimtab.rehearse.process import rehearsal_notes, rehearsed_steps
        from trimtab.zeroth.batches import BatchStream, Collate
        from trimtab.zeroth.optimizer import ZerothOrder
        from trimtab.zeroth.tokens import starts_with

        config, plan, tokenizer, training = job.config, job.plan, job.prepared.processor, job.config.training
        self._job = job
        job.model.eval()
        self._collate = Collate(
            tokenizer.pad_token_id,
            config.data.max_length,
            bos_id=starts_with(tokenizer),
            pad_to_multiple=1 if plan.kind == "cpu" else 16,
        )
        micro_batches = training.gradient_accumulation_steps * plan.processes
        self._batches = BatchStream(
            job.prepared.train,
            training.batch_size,
            micro_batches,
            config.seed,
            self._collate,
        )
        self._held_out: Sequence[Example] = job.prepared.eval
        self._asked: Asked = job.prepared.own
        if shapes_only() and job.prepared.eval:
            size = training.eval_batch_size or training.batch_size
            places = heaviest(job.prepared.eval, size, plan.processes)
            self._held_out = [job.prepared.eval[place] for place in places]
            self._asked = Asked([self._asked.questions[place] for place in places], self._asked.task)
        self.steps_per_epoch = self._batches.steps_per_epoch
        whole = self.total = training.max_steps or math.ceil(training.epochs * self.steps_per_epoch)
        projects = config.zeroth.interval if config.zeroth.method == "dizo" else 0
        few = rehearsed_steps() or max(FEW, projects)
        if shapes_only() and job.checkpoint is None and whole > few:
            self._batches = HeaviestEarly(self._batches, whole=whole, made=few)
            rehearsal_notes(HEAVIEST_FIRST)
            if rehearsed_steps() is None:
                self.total = few
                rehearsal_notes(FEW_STEPS.format(made=few))
        self.evaluates = bool(job.prepared.eval)
        self.optimizer = ZerothOrder(job.model, engine_settings(config, whole))
        if why := self.optimizer.plain_in_rehearsal:
            rehearsal_notes(
                f"memory of passes as they run uncaptured ({why}); a GPU captures most models' passes, and then keeps "
                "a ring of scratch for changed weights and the memory of each captured shape"
            )
        self._drawn: list[Any] = []

    @property
    def skipped(self) -> int:
        """Steps that changed no weight, for numbers in them that were not finite."""
        return self.optimizer.skipped

    def open(self, *, main: bool) -> None:
        """Begin or go on in the run's folder, or refuse; the main process writes."""
        run = self._job.run
        file = run.claim(TRAJECTORY) if main else run.path / TRAJECTORY
        self.optimizer.record(file, **about(self._job.config, self._job.plan))

    def step(self) -> tuple[int, int, dict[str, float], tuple[str, ...]]:
        """One step: its number, the data drawn so far, its figures, and those that are shown beside the loss."""
        optimizer = self.optimizer
        result = optimizer.step(self._draw(), more=optimizer.step_number + 1 < self.total)
        optimizer.project(self._draw)  # where one is due
        return optimizer.step_number, self._batches.taken, *figures_of(result, optimizer)

    def _draw(self) -> list[Any]:
        self._drawn = self._batches()
        return self._drawn

    def drawn(self) -> list[dict[str, Any]]:
        """The micro-batches that were drawn last, by their parts; those of all processes."""
        return [vars(batch) for batch in self._drawn]

    def losses_again(self, batch: Mapping[str, Any]) -> Any:
        """The losses of one of them once more, for whoever watches the modules."""
        from trimtab.zeroth.objective import ScoreBatch

        return self.optimizer.losses_again(ScoreBatch(**batch))

    def measure(self, heard: Callable[[int, int], None]) -> dict[str, float]:
        """Figures of the weights as they are on what is held out; every process calls it."""
        from trimtab.recipes.scored_eval import evaluate, measures

        self.optimizer.settle()
        training = self._job.config.training
        size = training.eval_batch_size or training.batch_size
        judged = evaluate(self._job.model, self._held_out, self._collate, size, heard)
        return measures(judged, *self._asked)

    def state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def beside(self) -> dict[str, Part]:
        written = self.optimizer.recorded()
        return {TRAJECTORY: Part(*written)} if written is not None else {}

    def restore(self, state: dict[str, Any], taken: int) -> None:
        self.optimizer.load_state_dict(state)
        self._batches.taken = taken


def figures_of(result: StepResult, optimizer: ZerothOrder) -> tuple[dict[str, float], tuple[str, ...]]:
    """A step's figures for metrics.jsonl, and those that are shown beside the loss."""
    # Of FZOO's several slopes the mean size: their signs mean nothing together.
    slopes = [abs(c) for c in result.coefficients] if len(result.coefficients) > 1 else result.coefficients
    slope = math.fsum(slopes) / len(slopes) if slopes else 0.0
    values = {
        "loss": result.loss,
        "learning_rate": result.learning_rate,
        "projected_gradient": slope,
        "forwards": optimizer.forwards,
    }
    return values, (f"projected gradient {slope:.3g}", f"forwards {optimizer.forwards:,}")


def _outcome(job: Job, driver: LoopDriver) -> dict[str, Any]:
    """What the steps cost, and the figures before the first one and of the weights that are kept."""
    optimizer: ZerothOrder = driver.engine.optimizer
    found: dict[str, Any] = {
        "zeroth": job.config.zeroth.method,
        "forwards": optimizer.forwards,
        "projected_tensors": len(optimizer.projected),
    }
    if driver.main:
        found["trajectory_bytes"] = (job.run.path / TRAJECTORY).stat().st_size
    if driver.ended_early:
        return found
    progress = driver.progress
    before, after = progress.evaluation_at(0), progress.evaluation_at(driver.kept_step)
    return found | {
        "kept_step": driver.kept_step,
        "eval_loss": {"before": before.get("loss"), "after": after.get("loss")},
        "metrics": {
            name: {"before": before[name], "after": after.get(name)}
            for name in before
            if name not in ("step", "loss")
        },
        "evaluations": progress.evaluations,
    }


def about(config: Config, plan: PlacementPlan) -> dict[str, Any]:
    """What a replay needs to make the model before the first step again."""
    made = {
        "model": config.model.model_dump(exclude={"trust_remote_code"}),
        "method": config.method,
        "seed": config.seed,
    }
    if config.method == "lora":
        made["lora"] = config.lora.model_dump()
    return {"base": made | {"weight_precision": plan.weight_precision}}


def encode_all(
    tokenizer: Any, questions: Sequence[Question], config: Config, say: Say, *, gold_alone: bool = False
) -> tuple[list[Example], list[Question]]:
    """Questions as token ids; with `gold_alone` the right answer is the only candidate. What is too long is said."""
    from trimtab.zeroth.tokens import encode_example, starts_with

    examples, kept, long = [], [], 0
    least = 1 if starts_with(tokenizer) is None else 2
    for question in questions:
        options = [question.options[question.gold]] if gold_alone else question.options
        gold = 0 if gold_alone else question.gold
        example = encode_example(tokenizer, question.prompt, options, gold, question.where)
        answer = max(map(len, example.candidates))
        if len(example.prompt) + answer > config.data.max_length:
            long += 1
            if config.data.too_long == "drop":
                continue
            if config.data.max_length - answer < least:
                raise RequestError.of(
                    f"{question.where}: its longest answer has {answer:,} tokens",
                    f"data.max_length={config.data.max_length} leaves no room for the prompt before it",
                    "raise data.max_length, or set data.too_long=drop",
                )
        examples.append(example)
        kept.append(question)
    if long:
        what = "dropped" if config.data.too_long == "drop" else "lose the left end of their prompt"
        say(f"  {long:,} rows over data.max_length={config.data.max_length} {what}")
    if questions and not examples:
        raise RequestError.of(
            f"data.max_length={config.data.max_length}: every row is longer",
            "data.too_long=drop leaves none",
            "raise data.max_length, or set data.too_long=truncate",
        )
    return examples, kept


def engine_settings(config: Config, total: int) -> ZerothSettings:
    """The optimizer's settings from ours."""
    from trimtab.zeroth.settings import Schedule, ZerothSettings

    zeroth, training = config.zeroth, config.training
    assert zeroth.eps is not None, "the recipe's defaults are filled in"
    warmup = (
        math.ceil(training.warmup_ratio * total) if training.warmup_steps is None else training.warmup_steps
    )
    schedules: dict[str, Schedule] = {"linear": "linear", "cosine": "cosine"}
    return ZerothSettings(
        **zeroth.model_dump(include=SAME_NAMES),
        projection_roles=tuple(zeroth.projection_roles),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        # It takes some ten seconds for each shape of batch, and halves the time of a step.
        compile=total >= COMPILE_FROM,
        seed=config.seed,
        schedule=schedules.get(training.lr_scheduler, "constant"),
        warmup_steps=0 if training.lr_scheduler == "constant" else warmup,
        total_steps=total,
    )


ZEROTH_ORDER = Recipe(
    name="zeroth_order",
    settings=schema.ZerothSettings,
    words=lambda config: f"zeroth-order steps ({config.zeroth.method})",
    workload=_workload,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=_outcome,
    look=None,
    answer=None,
    fast=frozenset(),
    captures=True,
    fullest=scored_rows,
)
