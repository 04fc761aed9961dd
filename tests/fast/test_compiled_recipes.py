"""Layers compiled by themselves in the models of vision, voice and GRPO: the losses and gradients of plain layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from picture_rows import drawn, question
from tiny_processors import tiny_pair
from trimtab.data.picture_collate import PictureCollator
from trimtab.fast.answer_loss import AnswerLoss, told_labels
from trimtab.fast.blocks import Blocks, compile_blocks
from trimtab.fast.lora import use_fast_adapters
from trimtab.models.outputs import loss_of
from trimtab.models.voice_loss import teach_voice
from trimtab.models.voice_places import with_places
from trimtab.recipes.picture_trainer import ROWS, answers_alone
from voice_batches import batch, rows, voice_model

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
VISION = r".*(vision|visual).*"
TOWERS = ("SiglipEncoderLayer", "Qwen2_5_VLVisionBlock")
GRAPHS = ("gemma3",)
"""Families whose towers are graphs. Qwen's layers ask the batch how long each picture is; of LLaVA's an inner layer's
output is taken by hooks that no compiler follows."""
Gradients = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adapted(model: Any, but: str | None = None) -> Any:
    """`but`: modules by these names get no adapter."""
    torch.manual_seed(1)
    # As the recipes load it; a layer that keeps a cache is not compiled.
    model.config.get_text_config().use_cache = False
    return get_peft_model(model, replace(LORA, exclude_modules=but)).train()


def learned(model: Any, some: dict[str, Any]) -> tuple[torch.Tensor, Gradients]:
    some = dict(some)
    numbers = some.pop(ROWS, None)
    model.zero_grad(set_to_none=True)
    if numbers is None:
        loss = model(**some).loss
    else:
        with AnswerLoss(model).asked(told_labels(some), numbers):
            loss = loss_of(model(**some))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compiled(model: Any, backend: str) -> tuple[Any, Blocks]:
    fast = copy.deepcopy(model)
    assert use_fast_adapters(fast) > 0
    # Demanded: what is not of a tower has to be compiled.
    blocks = compile_blocks(fast, dynamic=True, demanded=True, _backend=backend)
    return fast, blocks


def same(model: Any, fast: Any, batches: list[dict[str, Any]], rtol: float) -> None:
    for some in batches:
        (loss, wanted), (ours, found) = learned(model, some), learned(fast, some)
        torch.testing.assert_close(ours, loss, rtol=rtol, atol=1e-9)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=rtol * 100, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_voice(backend: str, tmp_path: Path) -> None:
    model = voice_model(num_hidden_layers=2).double()
    teach_voice(model)
    model = adapted(model)
    fast, blocks = compiled(model, backend)
    batches = [with_places(batch(rows(n, seed=n)), model.config) for n in (3, 2)]
    same(model, fast, batches, 1e-9)
    assert blocks.compiled == 2
    assert blocks.graphs
    assert not blocks.plain
    graphs = blocks.graphs
    fast.eval()
    with torch.no_grad():
        fast(**batches[0])
    assert blocks.graphs == graphs, "an evaluation compiles nothing"


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["adapted tower", "frozen tower"])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "gemma3"])
def test_a_model_that_sees_and_its_kept_adapter(family: str, frozen: bool, tmp_path: Path) -> None:
    """Trained by all the fast parts, kept, and loaded by plain PEFT over the untouched model."""
    base, processor = tiny_pair(family)
    model = adapted(copy.deepcopy(base), *([VISION] if frozen else []))
    fast, blocks = compiled(model, "eager")
    collate = answers_alone(model, PictureCollator(processor, max_length=512), numbered=True)
    asked = [
        question("which colour?", "red", drawn()),
        question("say what you see there", "a blue thing", drawn(24, 44, "blue")),
    ]
    batches = [collate(asked), collate(asked[:1])]
    same(model, fast, batches, 1e-5)
    assert blocks.graphs
    towers = [layer for layer in fast.modules() if type(layer).__name__ in TOWERS]
    assert len(towers) == 3
    assert blocks.layers - blocks.compiled == (0 if family in GRAPHS else 3), blocks.plain
    trained = [p for p in fast.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for some in batches:
        learned(fast, some)
        optimizer.step()
    fast.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    some = PictureCollator(processor, max_length=512)(asked)
    with torch.no_grad():
        torch.testing.assert_close(again(**some).logits, fast.eval()(**some).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_steps_between_generations(tiny_model: Path) -> None:
    """As GRPO takes them: a generation with a cache in evaluation mode, then a pass with gradients, and again."""
    from transformers import AutoModelForCausalLM

    model = adapted(AutoModelForCausalLM.from_pretrained(tiny_model))
    fast, blocks = compiled(model, "aot_eager")
    ids = torch.randint(5, 200, (2, 7), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        said = []
        for one in (model, fast):
            one.eval()
            with torch.no_grad():
                said.append(one.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0))
            one.train()
        assert torch.equal(*said)
        same(model, fast, [{"input_ids": said[0], "labels": said[0]}], 1e-5)
    assert blocks.graphs
    assert not blocks.plain
