"""The masked-diffusion objective, held against a direct evaluation: one row and one token at a time."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from masked_rows import END, IMAGE, MASK, PLAN, ROWS, padded, seeing_model, seen_batch, text_model
from trimtab.errors import RequestError
from trimtab.models.diffusion import MaskedDiffusion, mask_token_id, spare_tokens
from trimtab.models.ended_answers import EndedAnswers, with_ends

LENGTH = 5
Row = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def model() -> Any:
    model = text_model("llama")
    with torch.no_grad():  # so that losses differ from token to token
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


def objective_of(model: Any, length: int | None = LENGTH, seed: int = 7) -> MaskedDiffusion:
    return MaskedDiffusion(model, mask_id=MASK, end_id=END, seed=seed, answer_length=length)


def losses(
    objective: MaskedDiffusion, model: Any, batch: dict[str, Any], step: int | None, items: Any = None
) -> Any:
    masked = objective.inputs(batch, step)
    return objective.loss(model(**masked.inputs).logits, masked.targets, items)


def everyone(length: int) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


@torch.no_grad()
def direct(model: Any, objective: MaskedDiffusion, rows: list[Row], step: int | None) -> tuple[float, int]:
    """Mean over all answer tokens of -log p(token | the row with that half's tokens masked); no batch, no padding."""
    total, count = 0.0, 0
    for question, answer in rows:
        answer = answer + [END] * (LENGTH - len(answer))
        whole = question + answer
        labels = [-100] * len(question) + answer
        first = objective.masks(torch.tensor([whole]), torch.tensor([labels]), step)[0].tolist()
        for half in (True, False):
            hidden = [place for place in range(len(question), len(whole)) if first[place] == half]
            noised = [MASK if place in hidden else token for place, token in enumerate(whole)]
            out = model(input_ids=torch.tensor([noised]), attention_mask=everyone(len(whole))).logits[0]
            for place in hidden:
                scores = out[place].double().tolist()
                highest = max(scores)
                norm = highest + math.log(sum(math.exp(score - highest) for score in scores))
                total += norm - scores[whole[place]]
                count += 1
    return total / count, count


@pytest.mark.parametrize("step", [0, 1, 2, None])
def test_the_loss_is_that_of_each_masked_token_by_itself(model: Any, step: int | None) -> None:
    objective = objective_of(model)
    loss, trained = losses(objective, model, padded(ROWS), step)
    expected, count = direct(model, objective, ROWS, step)
    assert int(trained) == count == LENGTH * len(ROWS)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_columns_or_only_the_answers_give_one_loss(attention: str) -> None:
    model = text_model("qwen3", attention)
    objective = objective_of(model)
    fewer, _ = losses(objective, model, padded(ROWS), 0)
    assert "logits_to_keep" in objective.inputs(padded(ROWS), 0).inputs
    objective.two_way.keeps = False
    assert "logits_to_keep" not in objective.inputs(padded(ROWS), 0).inputs
    torch.testing.assert_close(losses(objective, model, padded(ROWS), 0)[0], fewer)


def test_each_answer_token_is_learned_once_and_seen_in_the_other_half(model: Any) -> None:
    objective = objective_of(model)
    objective.two_way.keeps = False
    for step in range(20):
        batch = with_ends(padded(ROWS), END, LENGTH)
        inputs, targets = objective.inputs(batch, step)
        assert "labels" not in inputs
        answers = batch["labels"].ne(-100)
        first, second = targets.ne(-100).chunk(2)
        assert torch.equal(first ^ second, answers)
        assert not (first & second).any()
        assert first.any(1).all()
        for half, ids in zip((first, second), inputs["input_ids"].chunk(2), strict=True):
            assert torch.equal(ids, batch["input_ids"].masked_fill(half, MASK))
        assert torch.equal(targets[targets.ne(-100)].sort().values, batch["labels"][answers].sort().values)


def test_as_many_tokens_are_masked_as_a_uniform_time_says(model: Any) -> None:
    """With t uniform all counts from 0 to n are equally likely; none becomes one, and all is where a sampler starts."""
    objective, batch, draws = objective_of(model, None), padded([([5], [20, 21, 22, 23])]), 3000
    counts = Counter(
        int(objective.masks(batch["input_ids"], batch["labels"], step).sum()) for step in range(draws)
    )
    assert set(counts) == {1, 2, 3, 4}
    for masked, share in ((1, 2 / 5), (2, 1 / 5), (3, 1 / 5), (4, 1 / 5)):
        assert counts[masked] / draws == pytest.approx(share, abs=0.04)


def test_a_rows_masks_are_its_own(model: Any) -> None:
    """The same on whichever rank it comes, in whatever company; other ones at each step, fixed ones to evaluate."""
    objective = objective_of(model)

    def drawn(rows: list[Row], step: int | None, one: MaskedDiffusion = objective) -> list[list[bool]]:
        batch = with_ends(padded(rows), END, LENGTH)
        masks = one.masks(batch["input_ids"], batch["labels"], step)
        return [mask[labels.ne(-100)].tolist() for mask, labels in zip(masks, batch["labels"], strict=True)]

    many = [([5, 6, 7 + n], [20 + n, 21, END]) for n in range(8)]
    together = drawn(many, 3)
    assert drawn(many[::-1], 3) == together[::-1]
    assert drawn(many[:3], 3) + drawn([*many[3:], ([5] * 9, [30] * 9)], 3)[:5] == together
    assert drawn(many, 3, objective_of(model)) == together
    assert drawn(many, 4) != together
    assert drawn(many, 3, objective_of(model, seed=8)) != together
    assert drawn(many, None) == drawn(many, None)
    state = torch.random.get_rng_state()
    drawn(many, 5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_micro_batches_add_up_to_the_whole_batch(model: Any) -> None:
    """With the step's count of tokens; means of unequal parts would not."""
    objective = objective_of(model, 3)
    rows = [([5, 6], [20, 21, 22, 23, 26, 27, 28]), ([7], [24]), ([8], [25])]

    def gradient(parts: list[list[Row]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        items = sum(int(with_ends(padded(part), END, 3)["labels"].ne(-100).sum()) for part in parts)
        assert items == 7 + 3 + 3
        total = 0.0
        for part in parts:
            loss, _ = losses(objective, model, padded(part), 0, items)
            loss.backward()
            total += loss.item()
        return total, model.lm_head.weight.grad.clone()

    whole, by_whole = gradient([rows])
    parts, by_parts = gradient([rows[:1], rows[1:]])
    assert parts == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(by_parts, by_whole)
    plain = [losses(objective, model, padded(part), 0)[0].item() for part in (rows[:1], rows[1:], rows)]
    assert plain[2] == pytest.approx(whole, rel=1e-5)
    assert sum(plain[:2]) / 2 != pytest.approx(whole, rel=1e-3)


def one_rank(rank: int, folder: Path) -> None:
    """A row a rank. As gradients are averaged, a trainer multiplies each loss by the number of ranks."""
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=(folder / "meet").as_uri()
    )
    model = seeing_model("llava_onevision")
    batch = {name: value[rank : rank + 1] for name, value in seen_batch(model).items()}
    objective = objective_of(model)
    objective.check(batch, PLAN)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    masked = objective.inputs(batch, 3)
    with objective.pictures_once():
        loss, _ = objective.loss(wrapped(**masked.inputs).logits, masked.targets, 2 * LENGTH)
    (loss * 2).backward()
    found = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    torch.save((objective.two_way.shares, loss.item(), found), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_rank, (tmp_path,), nprocs=2)
    (shares, first, found), (also, second, same) = (torch.load(tmp_path / f"{n}.pt") for n in range(2))
    assert shares
    assert also
    model = seeing_model("llava_onevision")
    loss, _ = losses(objective_of(model), model, seen_batch(model), 3)
    loss.backward()
    assert first + second == pytest.approx(loss.item(), rel=1e-5)
    tower = [name for name in found if "vision_tower" in name]
    assert tower
    for name, weight in model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], same[name], rtol=0, atol=0)
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-5)


def test_a_batch_without_answers_trains_nothing(model: Any) -> None:
    loss, trained = losses(objective_of(model), model, padded([([5, 6], []), ([7], [])]), 0)
    assert (loss.item(), int(trained)) == (0.0, 0)
    loss.backward()


def test_answers_are_filled_with_ends_and_nothing_stands_behind_them() -> None:
    batch = padded([([5, 6, 7], [20, END]), ([8], [21]), ([9], [22, 23, 24, END])])
    batch["token_type_ids"] = batch["labels"].ne(-100).long()
    # What a template writes behind an answer would tell its length.
    batch["input_ids"][1, 2], batch["attention_mask"][1, 2] = 50, 1
    made = EndedAnswers(lambda rows: batch, END, 3)([])
    assert made["input_ids"].tolist() == [
        [5, 6, 7, 20, END, END],
        [8, 21, END, END, END, END],
        [9, 22, 23, 24, END, END],
    ]
    no = -100
    assert made["labels"].tolist() == [
        [no, no, no, 20, END, END],
        [no, 21, END, END, no, no],
        [no, 22, 23, 24, END, no],
    ]
    assert made["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    # Only where a token stands, its kind matters.
    assert (made["token_type_ids"] * made["attention_mask"]).tolist() == made["labels"].ne(no).long().tolist()
    again = with_ends(made, END, 3)
    assert all(torch.equal(again[name], made[name]) for name in made)
    longest = with_ends(batch, END, None)
    assert longest["labels"].ne(no).sum(1).tolist() == [4, 4, 4]


def test_an_answer_that_was_cut_does_not_end_there(model: Any) -> None:
    """The first row lost its end; the second has another one than the filling, and what a template put behind it."""
    batch = padded([([5], [20, 21]), ([6], [22, 9, 10])])
    objective = MaskedDiffusion(model, mask_id=MASK, end_id=END, seed=0, answer_length=4, ends=[9])
    made = objective.ended(lambda rows: batch)([])
    assert made["labels"].tolist() == [[-100, 20, 21, -100, -100], [-100, 22, 9, 10, END]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert int(losses(objective, model, made, 0)[1]) == 6


def test_only_the_last_answer_of_a_conversation_is_filled() -> None:
    batch = padded([([5], [20, 21, END, 6, 22])])
    batch["labels"][0, 4] = -100
    made = with_ends(batch, END, 4)
    assert made["input_ids"].tolist() == [[5, 20, 21, END, 6, 22, END, END, END]]
    assert made["labels"].tolist() == [[-100, 20, 21, END, -100, 22, END, END, END]]


def test_rows_padded_on_the_left_are_refused() -> None:
    batch = {name: value.flip(1) for name, value in padded(ROWS).items()}
    with pytest.raises(ValueError, match="on the right"):
        with_ends(batch, END, 3)


def test_the_collator_travels_to_a_worker() -> None:
    assert pickle.loads(pickle.dumps(EndedAnswers(padded, END, 3)))(ROWS).keys() == padded(ROWS).keys()


def test_adapters_bf16_and_checkpointing_are_no_hindrance() -> None:
    from peft import LoraConfig, get_peft_model

    for attention in ("sdpa", "eager"):
        inner = seeing_model("llava", attention).to(torch.bfloat16)
        model = get_peft_model(inner, LoraConfig(target_modules=["q_proj", "linear_1"], r=2))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        batch = seen_batch(inner)
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
        objective = objective_of(model)
        objective.check(batch, PLAN)
        assert objective.two_way.shares
        masked = objective.inputs(batch, 0)
        assert (masked.inputs["input_ids"] == IMAGE).sum() == 16
        with objective.pictures_once():
            loss, trained = objective.loss(model(**masked.inputs).logits, masked.targets)
        loss.backward()
        assert int(trained) == 2 * LENGTH
        learned = [name for name, w in model.named_parameters() if w.requires_grad and w.grad is not None]
        assert any("vision_tower" in name for name in learned)
        assert any("multi_modal_projector" in name for name in learned)


def test_a_mask_token_that_the_model_does_not_know_is_refused(model: Any) -> None:
    objective = MaskedDiffusion(model, mask_id=128, end_id=END, seed=0)
    with pytest.raises(RequestError, match=r"(?s)token 128, and the model has 128.*vision\.mask_token"):
        objective.check(padded(ROWS), PLAN)


def test_the_mask_token_is_the_settings_or_the_tokenizers(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert mask_token_id(tokenizer, "<|im_start|>") == start
    with pytest.raises(RequestError, match=r"(?s)the tokenizer has none.*no spare special one"):
        mask_token_id(tokenizer, None)
    with pytest.raises(RequestError, match=r"vision\.mask_token=\[M\] is no token"):
        mask_token_id(tokenizer, "[M]")
    with pytest.raises(RequestError, match="ends an answer"):
        mask_token_id(tokenizer, "<|im_end|>")

    more = ["<filename>", "<|reserved_1|>", "<|image_pad|>", "<start_of_turn>"]
    tokenizer.add_tokens(more, special_tokens=True)
    assert spare_tokens(tokenizer) == ["<|reserved_1|>", "<filename>"]
    with pytest.raises(RequestError, match=r"such as <\|reserved_1\|>, <filename>"):
        mask_token_id(tokenizer, None)
    tokenizer.add_special_tokens({"mask_token": "<|reserved_1|>"})
    assert mask_token_id(tokenizer, None) == tokenizer.convert_tokens_to_ids("<|reserved_1|>")
