"""Scores against plain full-logits computations without padding, and everything that a batch must not change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zeroth_helpers import rounding

from trimtab.zeroth.objective import (
    Example,
    build_batch,
    candidate_scores,
    example_losses,
    kept_logits,
    position_ids,
)

WORDS = [
    Example([5, 6, 7, 8, 9], [[11], [12]], 1),
    Example([5, 6], [[11], [12]], 0),
    Example([30, 31, 32, 33, 34, 35, 36], [[11], [12]], 0),
]
PHRASES = [
    Example([5, 6, 7], [[11, 12, 13], [14]], 1),
    Example([8], [[15, 16], [17, 18, 19, 20], [21]], 0),
    Example([9, 10, 11, 12, 13, 14], [[22, 23]], 0),
]
WITHIN = rounding(longest=128)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def direct(model: Any, example: Example) -> list[float]:
    """Mean log-probabilities from full logits: one row at a time, no padding."""
    scores = []
    for candidate in example.candidates:
        ids = torch.tensor([example.prompt + candidate])
        table = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        start = len(example.prompt) - 1
        scores.append(float(torch.stack([table[start + j, t] for j, t in enumerate(candidate)]).mean()))
    return scores


@pytest.mark.parametrize("examples", [WORDS, PHRASES, WORDS + PHRASES])
@torch.no_grad()
def test_scores_equal_the_direct_computation_without_padding(model: Any, examples: list[Example]) -> None:
    batch = build_batch(examples, pad_id=0, max_length=64)
    scores = candidate_scores(model, batch)
    assert scores.shape == (1, len(examples), max(len(e.candidates) for e in examples))
    for e, example in enumerate(examples):
        wanted = torch.tensor(direct(model, example))
        torch.testing.assert_close(scores[0, e, : len(wanted)], wanted, rtol=WITHIN, atol=0)
        assert torch.isneginf(scores[0, e, len(wanted) :]).all()


def test_one_row_for_each_example_of_single_tokens_else_one_for_each_candidate() -> None:
    words = build_batch(WORDS, 0, 64)
    assert words.input_ids.shape == (3, 7)
    assert words.keep == 1
    assert words.row.tolist() == [0, 0, 1, 1, 2, 2]
    phrases = build_batch(PHRASES, 0, 64)
    assert phrases.input_ids.shape[0] == 2 + 3 + 1
    assert phrases.keep == 4
    mixed = build_batch([WORDS[0], PHRASES[1]], 0, 64)
    assert mixed.input_ids.shape[0] == 1 + 3


def test_rows_are_padded_on_the_left_and_never_hold_the_last_token() -> None:
    batch = build_batch(PHRASES[:1], pad_id=99, max_length=64, pad_to_multiple=8)
    assert batch.input_ids.tolist() == [[99, 99, 99, 5, 6, 7, 11, 12], [99, 99, 99, 99, 99, 5, 6, 7]]
    assert position_ids(batch.attention_mask).tolist() == [[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 2]]


@torch.no_grad()
def test_padding_changes_no_score(model: Any) -> None:
    plain = candidate_scores(model, build_batch(PHRASES, 0, 64))
    padded = candidate_scores(model, build_batch(PHRASES, 7, 64, pad_to_multiple=32))
    torch.testing.assert_close(plain, padded, rtol=WITHIN, atol=0)


def test_a_long_prompt_keeps_its_right_end_and_its_first_token() -> None:
    long = Example(list(range(1, 31)), [[40, 41], [42]], 0)
    assert build_batch([long], 0, 10).input_ids[0].tolist() == [*range(23, 31), 40]
    kept = build_batch([long], 0, 10, bos_id=1)
    assert kept.input_ids[0].tolist() == [1, *range(24, 31), 40]
    # The same prompt for every candidate, however short.
    assert kept.input_ids[1].tolist() == [0, 1, *range(24, 31)]
    assert build_batch([long], 0, 10, bos_id=5).input_ids[0].tolist() == [*range(23, 31), 40]
    with pytest.raises(ValueError, match="max_length"):
        build_batch([long], 0, 2)


def test_empty_parts_are_refused() -> None:
    for broken in (Example([], [[1]], 0), Example([1], [[]], 0), Example([1], [], 0)):
        with pytest.raises(ValueError, match="example 1"):
            build_batch([WORDS[0], broken], 0, 8)


@torch.no_grad()
def test_lanes_repeat_the_batch(model: Any) -> None:
    batch = build_batch(PHRASES, 0, 64)
    once, thrice = candidate_scores(model, batch), candidate_scores(model, batch, lanes=3)
    assert thrice.shape == (3, *once.shape[1:])
    for lane in thrice:
        torch.testing.assert_close(lane, once[0], rtol=WITHIN, atol=0)


@torch.no_grad()
def test_each_lane_reads_its_own_rows(model: Any) -> None:
    """A model that adds a lane's number to one token's logit moves only that lane's scores."""
    batch = build_batch(WORDS, 0, 64)
    rows = batch.input_ids.shape[0]

    class Lifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
            inner = self.inner(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
            ).logits
            inner[rows:, :, 12] += 5.0
            return inner

    plain, (first, second) = candidate_scores(model, batch)[0], candidate_scores(Lifted(), batch, lanes=2)
    torch.testing.assert_close(first, plain, rtol=WITHIN, atol=0)
    assert (second[:, 1] > plain[:, 1] + 1).all()
    assert (second[:, 0] < plain[:, 0]).all()


@torch.no_grad()
def test_a_forward_that_knows_nothing_of_positions_or_kept_logits() -> None:
    torch.manual_seed(0)

    class Bigrams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 40)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.table(input_ids)

    model = Bigrams()
    batch = build_batch(PHRASES, 0, 64)
    logprobs = torch.log_softmax(model.table.weight, -1)
    want = (logprobs[7, 11] + logprobs[11, 12] + logprobs[12, 13]) / 3
    torch.testing.assert_close(candidate_scores(model, batch)[0, 0, 0], want)
    assert kept_logits(model, batch.input_ids, batch.attention_mask, 2).shape == (6, 2, 40)


@torch.no_grad()
def test_only_the_kept_positions_go_through_the_head(model: Any) -> None:
    seen: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    candidate_scores(model, build_batch(WORDS, 0, 64))
    candidate_scores(model, build_batch(PHRASES, 0, 64))
    hook.remove()
    assert seen == [1, 4]


@torch.no_grad()
def test_the_head_is_cut_under_an_adapter_too(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trimtab.config.schema import LoraSettings
    from trimtab.models.adapters import add_lora

    tuned: Any = add_lora(AutoModelForCausalLM.from_pretrained(tiny_model), LoraSettings()).eval()
    seen: list[int] = []
    tuned.get_base_model().lm_head.register_forward_hook(lambda m, i, output: seen.append(output.shape[1]))
    candidate_scores(tuned, build_batch(WORDS, 0, 64))
    assert seen == [1]


def test_losses_are_cross_entropy_over_candidates_or_the_answers_own() -> None:
    scores = torch.tensor([[[-1.0, -2.0, -torch.inf], [-3.0, -0.5, -0.25]]])
    losses = example_losses(scores, torch.tensor([1, 2]))
    torch.testing.assert_close(
        losses, nn.functional.cross_entropy(scores[0], torch.tensor([1, 2]), reduction="none")[None]
    )
    assert torch.isfinite(losses).all()
    torch.testing.assert_close(
        example_losses(scores[..., :1], torch.tensor([0, 0])), torch.tensor([[1.0, 3.0]])
    )
    assert torch.isnan(example_losses(scores, torch.tensor([1, -1]))).tolist() == [[False, True]]


def test_an_examples_loss_does_not_depend_on_its_batch(model: Any) -> None:
    one, two = Example([5, 6, 7], [[8, 9]], 0), Example([5, 6], [[3], [4]], 1)
    apart = [candidate_losses(model, [each]) for each in (one, two)]
    torch.testing.assert_close(candidate_losses(model, [one, two]), torch.cat(apart, 1), rtol=WITHIN, atol=0)
    assert apart[0].item() > 0.1  # that of its only candidate, not of a choice without an alternative


def candidate_losses(model: Any, examples: list[Example]) -> Tensor:
    batch = build_batch(examples, pad_id=0, max_length=16)
    return example_losses(candidate_scores(model, batch), batch.label)


def test_gradients_flow_for_first_order_use(model: Any) -> None:
    batch = build_batch([WORDS[0], *PHRASES[:2]], 0, 64)
    model.zero_grad()
    example_losses(candidate_scores(model, batch), batch.label).mean().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = []
    for example in (WORDS[0], *PHRASES[:2]):
        rows = [torch.tensor([example.prompt + c]) for c in example.candidates]
        tables = [torch.log_softmax(model(input_ids=row).logits[0], -1) for row in rows]
        n = len(example.prompt) - 1
        scores = [
            torch.stack([t[n + j, c[j]] for j in range(len(c))]).mean()
            for t, c in zip(tables, example.candidates, strict=True)
        ]
        plain.append(nn.functional.cross_entropy(torch.stack(scores), torch.tensor(example.label)))
    torch.stack(plain).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6)
    assert any(gradient.abs().max() > 0 for gradient in ours.values())


@torch.no_grad()
def test_log_probabilities_are_fp32_for_a_bf16_model(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    half: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    batch = build_batch(WORDS, 0, 64)
    logits = kept_logits(half, batch.input_ids, batch.attention_mask, 1)
    assert logits.dtype == torch.bfloat16
    scores = candidate_scores(half, batch)
    assert scores.dtype == torch.float32
    wanted = torch.log_softmax(logits[:, 0].double(), -1)[:, [11, 12]]
    torch.testing.assert_close(scores[0].double(), wanted, rtol=0, atol=1e-5)


def test_imports_torch_alone() -> None:
    code = (
        "import sys; import trimtab.zeroth.objective, trimtab.zeroth.tokens; "
        "sys.exit(any(name in sys.modules for name in ('transformers', 'peft', 'datasets', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
