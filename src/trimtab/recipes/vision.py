"""Answers about pictures: a language model that sees, tuned with its own processor or with SHIRG's views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.config.schema import Config, VisionSettings
from trimtab.errors import RequestError
from trimtab.files import whole_file
from trimtab.models.families import IMAGE_TEXT
from trimtab.placement import PlacementPlan, Workload, return_outputs
from trimtab.recipes.fullest_rows import Fullest, NotExecuted
from trimtab.recipes.look import Look
from trimtab.recipes.outcomes import held_out_loss
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say

if TYPE_CHECKING:
    from trimtab.data.picture_collate import PictureCollator
    from trimtab.data.pictures import PictureRow
    from trimtab.fast.answer_loss import AnswerLoss
    from trimtab.models.diffusion import MaskedDiffusion
    from trimtab.recipes.trainer_driver import TrainerDriver

PICTURES = "pictures"
"""The folder of a run that keeps the pictures it is shown by."""
WIDEST = 512
"""Pixels of a kept picture's longer side at most."""


_SIDES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Of the pictures that are tried for the one that takes most of a row; of several that take the same, the smallest."""


class Seen(NamedTuple):
    """What this recipe alone goes on with."""

    collator: Any
    metric: str


def _workload(config: Config, on_cpu: bool) -> Workload:
    twice = 2 if config.vision.objective == "masked_diffusion" else 1
    patches = None
    if config.vision.views == "shirg":
        from trimtab.models.load import load_model_config
        from trimtab.models.shirg_grid import VIEWS, grid_of

        patches = VIEWS * grid_of(config.shirg, load_model_config(config.model)).side ** 2
    return Workload(
        batch_size=config.training.batch_size * twice,
        max_length=config.data.max_length,
        gradient_checkpointing=config.training.gradient_checkpointing,
        patches=patches,
    )


def _need(config: Config) -> Need:
    return Need(
        {"training.batch_size": config.training.batch_size, "data.max_length": config.data.max_length},
        "weights, gradients, optimizer and activations of tower and language model",
        [
            "halve training.batch_size and double training.gradient_accumulation_steps",
            "set training.gradient_checkpointing=true",
            "take fewer tokens a picture: vision.views=shirg with a smaller shirg.keep, or a smaller model",
        ],
    )


def _eyes(config: Config) -> tuple[Any, PictureCollator]:
    """What turns pictures and questions into batches."""
    from trimtab.data.picture_collate import PictureCollator
    from trimtab.models.load import load_model_config, load_processor

    processor: Any = load_processor(config.model, IMAGE_TEXT)
    if config.vision.views == "shirg":
        from trimtab.models.shirg import shirg_processor

        processor = shirg_processor(processor, config.shirg, load_model_config(config.model))
    return processor, PictureCollator(processor, max_length=config.data.max_length)


def _prepare(config: Config, plan: PlacementPlan, say: Say) -> Prepared:
    from trimtab.data.picture_fit import Fits
    from trimtab.data.picture_prepare import prepare_pictures

    processor, collator = _eyes(config)
    fits = Fits(collator, config.data.too_long)
    data = prepare_pictures(config.data, config.vision, config.seed, say, fits)
    for line in data.report.lines():
        say(line)
    seen = Seen(collator, data.metric)
    return Prepared(processor, data.train, data.eval, data.report, own=seen, length=collator.length)


def _fullest(config: Config, number: int) -> Fullest:
    """Rows of the picture that takes most tokens and leaves room for a word, and as many words as go behind it."""
    from trimtab.data.picture_collate import TooLong
    from trimtab.data.pictures import Picture, asked

    processor, collator = _eyes(config)
    longest = config.data.max_length

    def row(side: int, words: int) -> PictureRow:
        return asked(
            "?", ("a " * words,), (Picture(_blank(side), "a blank picture"),), "a row of full length"
        )

    def tokens(side: int, words: int) -> int:
        try:
            return collator.length(row(side, words))
        except TooLong:
            return longest + 1

    taken = {side: tokens(side, 1) for side in _SIDES}
    side = max((side for side in _SIDES if taken[side] <= longest), key=taken.__getitem__, default=None)
    if side is None:
        raise NotExecuted(f"a picture of {_SIDES[0]} pixels takes more than data.max_length={longest} tokens")
    words = longest - tokens(side, 1) + 1
    while words > 1 and tokens(side, words) > longest:
        words = words * 9 // 10
    prepared = Prepared(processor, [row(side, words)] * number, None, None, own=Seen(collator, ""))
    size = config.training.batch_size
    told = f"{size} row{'s' * (size > 1)} of {tokens(side, words):,} tokens with a picture of {side} × {side} pixels"
    return Fullest(prepared, told)


def _blank(side: int) -> bytes:
    import io

    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (side, side)).save(held, "PNG")
    return held.getvalue()


def _fit(config: Config, model: Any) -> None:
    if config.vision.views == "shirg":
        from trimtab.models.shirg import attach_shirg

        attach_shirg(model, config.shirg)


def _build(job: Job) -> TrainerDriver:
    from transformers import TrainingArguments

    from trimtab.models.take_part import take_part
    from trimtab.recipes.picture_trainer import PictureTrainer, answers_alone
    from trimtab.recipes.trainer_driver import TrainerDriver, trainer_arguments

    config, plan, prepared = job.config, job.plan, job.prepared
    arguments = TrainingArguments(
        **trainer_arguments(config, plan, job.run, evaluates=bool(prepared.eval), model=job.model),
        # Rows are pictures and questions until the collator has read them.
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=True,
    )
    # Also of those that are only evaluated on: shards are gathered there as well.
    if not all(row.pictures for row in [*prepared.train, *(prepared.eval or ())]):
        take_part(job.model, prepared.processor)
    collator = prepared.own.collator
    objective = _masked_diffusion(job) if config.vision.objective == "masked_diffusion" else None
    collate = objective.ended(collator) if objective else answers_alone(job.model, collator, numbered=True)
    driver = TrainerDriver(
        job,
        PictureTrainer,
        arguments,
        data_collator=collate,
        objective=objective,
        answers=_answer_loss(job, answers_alone(job.model, collator, numbered=True)),
    )
    if plan.strategy == "split":
        return_outputs(job.model)
    return driver


def _answer_loss(job: Job, collate: Any) -> AnswerLoss | None:
    """The loss at the model's head in chunks, tried with two rows; None where the model keeps its own."""
    import torch

    from trimtab.fast.answer_loss import proved, unproved
    from trimtab.models.load import shapes_only
    from trimtab.placement import move
    from trimtab.recipes.picture_trainer import ROWS

    plan = job.plan
    if plan.speed.head != "chunked":
        return None
    if plan.strategy == "sharded" or shapes_only():
        found = unproved(job.model)
    else:
        batch = move(collate(list(job.prepared.train[:2])), plan)
        rows = batch.pop(ROWS, None)
        with torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32"):
            found = proved(job.model, batch, rows)
    if isinstance(found, str):
        if "head" in plan.speed.demanded:
            raise RequestError.of("speed.head=chunked was asked for", found, "set speed.head: auto")
        job.say(f"loss by the model's own logits: {found}")
        return None
    return found


def _masked_diffusion(job: Job) -> MaskedDiffusion:
    """The objective, tried on the model with two rows before anything is trained."""
    from trimtab.models.diffusion import MaskedDiffusion, mask_token_id

    config, tokenizer = job.config, job.prepared.processor.tokenizer
    objective = MaskedDiffusion(
        job.model,
        mask_id=mask_token_id(tokenizer, config.vision.mask_token),
        end_id=tokenizer.eos_token_id,
        seed=config.seed,
        answer_length=config.vision.answer_length,
        ends=job.prepared.own.collator.end_ids,
    )
    objective.check(job.prepared.own.collator(list(job.prepared.train[:2])), job.plan)
    return objective


def _rows(job: Job) -> list[PictureRow]:
    """The held-out rows that are answered."""
    return list(job.prepared.eval or ())[: job.config.samples.held_out]


def _shown(job: Job) -> list[PictureRow]:
    return _rows(job)[: job.config.vision.show]


def _asks(job: Job) -> list[dict[str, Any]]:
    return [
        {"prompt": _question(row), "expected": row.answers[0], PICTURES: _files(number, row)}
        for number, row in enumerate(_shown(job))
    ]


def _look(job: Job, model: Any) -> Look:
    """Greedy answers to held-out pictures, scored by the set's own metric."""
    from trimtab.data.picture_metrics import score

    rows, seen = _rows(job), job.prepared.own
    if not rows:
        return Look([])
    given = _answers(job.config, job.plan, model, job.prepared.processor, seen.collator, rows)
    right = sum(score(seen.metric, said, row.answers) for said, row in zip(given, rows, strict=True))
    return Look(given[: len(_shown(job))], right, len(rows), f"accuracy ({seen.metric})")


def _answers(
    config: Config,
    plan: PlacementPlan,
    model: Any,
    processor: Any,
    collator: PictureCollator,
    rows: Sequence[PictureRow],
) -> list[str]:
    """To each row's last question, in the way that the model has learned to answer."""
    from trimtab.models.see import answer_pictures
    from trimtab.models.unmask import answer_by_unmasking

    if config.vision.objective == "masked_diffusion":
        return answer_by_unmasking(model, processor, collator, rows, plan, config.vision)
    return answer_pictures(model, processor, collator, rows, plan, config.samples.max_new_tokens)


def _answer(config: Config, plan: PlacementPlan, model: Any, question: str, pictures: Sequence[Path]) -> str:
    from trimtab.data.pictures import Picture, asked

    seen = tuple(Picture(path, str(path), config.vision.max_pixels) for path in pictures)
    # A row has an answer; what is asked of the model ends before it.
    row = asked(question, ("?",), seen, "the question")
    return _answers(config, plan, model, *_eyes(config), [row])[0]


def _outcome(job: Job, driver: TrainerDriver) -> dict[str, Any]:
    if driver.main and not driver.ended_early:
        _keep_pictures(job, _shown(job))
    return held_out_loss(job, driver)


def _keep_pictures(job: Job, rows: Sequence[PictureRow]) -> None:
    """Small copies of the pictures that the samples tell of, beside the summary."""
    folder = job.run.claim(PICTURES) if any(row.pictures for row in rows) else None
    for number, row in enumerate(rows):
        for name, picture in zip(_files(number, row), row.pictures, strict=True):
            assert folder is not None
            folder.mkdir(exist_ok=True)
            image = picture.open()
            image.thumbnail((WIDEST, WIDEST))
            with whole_file(job.run.path / name) as scratch:
                image.save(scratch, format="PNG")


def _question(row: PictureRow) -> str:
    """What the last user's message asks, without its pictures."""
    asked = [message for message in row.messages if message["role"] == "user"][-1]
    return " ".join(part["text"].strip() for part in asked["content"] if part["type"] == "text")


def _files(number: int, row: PictureRow) -> list[str]:
    return [f"{PICTURES}/{number}-{place}.png" for place in range(len(row.pictures))]


VISION = Recipe(
    name="vision",
    settings=VisionSettings,
    words=lambda config: (
        "fine-tuning on pictures"
        + (" (masked diffusion)" if config.vision.objective == "masked_diffusion" else "")
        + (", SHIRG's views" if config.vision.views == "shirg" else "")
    ),
    workload=_workload,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=_outcome,
    family=IMAGE_TEXT,
    fit=_fit,
    asks=_asks,
    look=_look,
    answer=_answer,
    fast=frozenset({"adapters", "head", "compile", "kernels"}),
    fullest=_fullest,
)
