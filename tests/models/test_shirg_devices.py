"""SHIRG's views where tower and language model are on GPUs, one or two: the numbers of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trimtab
from tiny_models import skeleton
from tiny_shirg import SMALL, batch_of, model_of
from trimtab.models.shirg import attach_shirg

ALL = SMALL.model_copy(update={"noise": 0.1, "merge": 0.9, "radial": "inward", "token_dropout": 0.2})
TOWER = {"model.vision_tower": 0, "model.multi_modal_projector": 0, "lm_head": 1}
SPLITS = {
    "words with the rest": {**TOWER, "model.language_model": 1},
    "connector apart": {**TOWER, "model.multi_modal_projector": 1, "model.language_model": 1},
    "words with the tower": TOWER
    | {f"model.language_model.{part}": 1 for part in ("layers", "norm", "rotary_emb")}
    | {"model.language_model.embed_tokens": 0},
}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=[SMALL, ALL], ids=["default", "everything"])
def on_cpu(request: pytest.FixtureRequest) -> Any:
    model = model_of("llava_onevision", request.param)
    model(**batch_of()).loss.backward()
    return model


def test_one_gpu_gives_what_the_cpu_gives(on_cpu: Any) -> None:
    with trimtab.virtual_gpus(1):
        model = model_of("llava_onevision", on_cpu.shirg.settings).cuda()
        batch = {name: value.cuda() for name, value in batch_of().items()}
        model(**batch).loss.backward()
        found = gradients(model)
        assert all(torch.equal(found[name], own) for name, own in gradients(on_cpu).items())
        del batch["labels"]
        assert model.generate(**batch, max_new_tokens=2, do_sample=False).is_cuda


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_two_gpus_that_share_the_model_give_it_too(on_cpu: Any, split: str) -> None:
    from accelerate import dispatch_model

    batch = batch_of()
    with trimtab.virtual_gpus(2):
        model = skeleton("llava_onevision", "cpu").eval()
        model.load_state_dict(on_cpu.state_dict())
        model = attach_shirg(
            dispatch_model(model, {"model.image_newline": 0, **SPLITS[split]}), on_cpu.shirg.settings
        )
        model(**{name: value.cuda() for name, value in batch.items()}).loss.backward()
        found, expected = gradients(model), gradients(on_cpu)
        for name, own in expected.items():
            assert torch.allclose(found[name], own, atol=1e-6), name
