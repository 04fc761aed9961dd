"""LaViDa's masked-diffusion objective: a model learns to fill in the masked tokens of an answer, all of it in sight.

Of each row t is drawn from U(0, 1), and each token of its answers is masked with probability (1 - ε) t + ε, one at
least. The batch is doubled, with the other tokens masked in the second half: every answer token is learned exactly
once a step. The loss is the mean cross-entropy over these tokens, each predicted at its own place. Never runs the
model, and never draws from a global generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.data.render import IGNORED
from trimtab.errors import RequestError, some_of
from trimtab.models.ended_answers import EndedAnswers, with_ends
from trimtab.models.two_way import Batch, TwoWay
from trimtab.placement import PlacementPlan, move

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

LEAST = 1e-3
"""ε: the smallest probability with which a token is masked."""


class Masked(NamedTuple):
    """A batch as the model gets it, and what it is to find there."""

    inputs: Batch
    """For `model(**inputs)`; there are no labels."""
    targets: torch.Tensor
    """(rows, columns) as the logits come: the token at each masked place, -100 elsewhere."""


class MaskedDiffusion:
    """The objective for one model.

    In a trainer, with the collator `objective.ended(collator)`:

        masked = objective.inputs(batch, step)
        with objective.pictures_once():
            outputs = model(**masked.inputs)
        loss, trained = objective.loss(outputs.logits, masked.targets, num_items)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        mask_id: int,
        end_id: int,
        seed: int,
        answer_length: int | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.two_way = TwoWay(model)
        self.mask_id, self.end_id = mask_id, end_id
        self.seed, self.answer_length, self.ends = seed, answer_length, tuple(ends)

    def check(self, batch: Mapping[str, Any], plan: PlacementPlan) -> None:
        """Refuse a model that cannot see both ways, and find whether both halves share their pictures.

        With a small batch of the collator, two rows with different pictures at best, before the model is wrapped.
        """
        import torch

        rows = self.two_way.model.get_input_embeddings().weight.shape[0]
        if not 0 <= self.mask_id < rows:
            raise RequestError.of(
                f"vision.mask_token is token {self.mask_id}, and the model has {rows}",
                "a masked token is looked up in the model's own table",
                "set vision.mask_token to a token that the model knows",
            )
        batch = move(with_ends(batch, self.end_id, self.answer_length, self.ends), plan)
        with torch.autocast(plan.kind, dtype=plan.torch_dtype, enabled=plan.precision != "fp32"):
            self.two_way.check(batch, self.end_id)

    def ended(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> EndedAnswers:
        """The collator for this objective."""
        return EndedAnswers(collate, self.end_id, self.answer_length, self.ends)

    def inputs(self, batch: Mapping[str, Any], step: int | None) -> Masked:
        """The doubled batch of one step; `step` None, for an evaluation, masks a row alike every time.

        A row's masks depend on the seed, the step and its own tokens alone: a resumed run draws the same, and so do
        two ranks that share the rows of one.
        """
        import torch

        batch = with_ends(batch, self.end_id, self.answer_length, self.ends)
        ids, labels, real = batch["input_ids"], batch["labels"], batch["attention_mask"].bool()
        answers = labels.ne(IGNORED)
        first = self.masks(ids, labels, step).to(ids.device)
        masked = torch.cat([first, answers & ~first])
        if self.two_way.asks:
            batch["question_mask"] = (answers.cumsum(1) == 0) & real
        targets = torch.cat([labels, labels]).masked_fill(~masked, IGNORED)
        noised = torch.cat([ids, ids]).masked_fill(masked, self.mask_id)
        columns = self.two_way.reachable(answers.any(0).nonzero().flatten(), ids.shape[1])
        if columns is not None:
            targets = targets[:, columns]
        return Masked(self.two_way.inputs(noised, real, batch, columns), targets)

    def masks(self, ids: torch.Tensor, labels: torch.Tensor, step: int | None) -> torch.Tensor:
        """Which answer tokens the first half masks; drawn on the CPU, row by row."""
        import torch

        masked = torch.zeros(labels.shape, dtype=torch.bool)
        for row, (tokens, targets) in enumerate(zip(ids.cpu(), labels.cpu(), strict=True)):
            places = targets.ne(IGNORED).nonzero().flatten()
            if len(places):
                text = ",".join(map(str, tokens[: int(places[-1]) + 1].tolist()))
                draw = torch.Generator().manual_seed(_number(f"{self.seed}|{step}|{text}"))
                chance = (1 - LEAST) * torch.rand(1, generator=draw) + LEAST
                drawn = torch.rand(len(places), generator=draw)
                # The token with the smallest number is masked in any case.
                masked[row, places] = (drawn < chance) | (drawn == drawn.min())
        return masked

    def pictures_once(self) -> Any:
        """Open this around the pass: where it was found to be exact, the tower sees each picture once."""
        return self.two_way.repeating(2)

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, num_items: torch.Tensor | int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean cross-entropy over masked tokens, and how many they are.

        With `num_items`, the tokens of all micro-batches and ranks of a step, their sum is divided by it: added up
        (and, as DDP takes means, multiplied by the number of ranks), the parts are the loss of the whole batch at once.
        """
        from torch.nn.functional import cross_entropy

        if logits.shape[:2] != targets.shape:
            raise ValueError(
                f"logits of {tuple(logits.shape)} do not go with targets of {tuple(targets.shape)}"
            )
        masked = targets.ne(IGNORED)
        trained = masked.sum()
        total = cross_entropy(logits[masked].float(), targets[masked], reduction="sum")
        return total / (trained.clamp(min=1) if num_items is None else num_items), trained


def _number(text: str) -> int:
    """63 bits of the text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def mask_token_id(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> int:
    """The token that stands for a masked one: `vision.mask_token`, else the tokenizer's own."""
    known = tokenizer.get_vocab()
    if wanted is not None and wanted in known:
        if known[wanted] != tokenizer.eos_token_id:
            return known[wanted]
        found, why = f"vision.mask_token={wanted} is the end-of-sequence token", "it ends an answer"
    elif wanted is not None:
        found = f"vision.mask_token={wanted} is no token of the model's tokenizer"
        why = "a masked token has one place of its own in the model's table of tokens"
    elif tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    else:
        found = "vision.objective=masked_diffusion needs a mask token, and the tokenizer has none"
        why = "something has to stand where a token is masked, and it must not be read as text"
    spare = spare_tokens(tokenizer)
    raise RequestError.of(
        found,
        why,
        f"set vision.mask_token to a token that your data does not use, such as {some_of(spare)}"
        if spare
        else "set vision.mask_token to a token that your data does not use; this tokenizer has no spare special one",
    )


def spare_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens that neither the tokenizer nor its chat template has a use for; those meant as spare first."""
    template = str(tokenizer.chat_template or "")
    named = {str(value) for value in tokenizer.special_tokens_map.values()}
    extra = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    spare = [
        token for token in extra if token not in named and token not in template and not _of(token, _BUSY)
    ]
    return sorted(spare, key=lambda token: not _of(token, _SPARE))


_SPARE = ("mask", "unused", "reserved")
_BUSY = (
    *("image", "img", "vision", "video", "audio", "row_"),
    *("im_start", "im_end", "turn", "utterance", "user", "assistant", "system", "header"),
)
"""What a processor writes around pictures and turns, by a template that the tokenizer need not know."""


def _of(token: str, words: tuple[str, ...]) -> bool:
    return any(word in token.lower() for word in words)
