"""The vision recipe with SHIRG's views end to end: by both objectives, as an adapter and as a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_vision import losses, model, rows, settings, train  # noqa: F401
from transformers import AutoConfig

from tiny_processors import saved_pair
from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.export.run import export_run
from trimtab.models.shirg import saved_shirg
from trimtab.recipes.ask import ask

SMALL = ("vision.views=shirg", "shirg.size=56", "shirg.crop=30", "shirg.keep=9")
DIFFUSION = ("vision.objective=masked_diffusion", "vision.mask_token=<video>", "vision.answer_length=4")


@pytest.mark.parametrize("objective", [(), DIFFUSION], ids=["causal", "masked_diffusion"])
def test_a_run_sees_by_two_views(settings: list[str], objective: tuple[str, ...]) -> None:  # noqa: F811
    more = ("training.gradient_checkpointing=true", "training.max_steps=6", "shirg.token_dropout=0.1")
    summary, run = train(settings, *SMALL, *objective, *more)
    assert summary["status"] == "finished"
    assert losses(run)[-1] < losses(run)[0]
    config = load_config(run / "config.yaml", [])
    assert (config.vision.views, config.shirg.keep) == ("shirg", 9)
    picture = run / summary["samples"][0]["pictures"][0]
    assert isinstance(ask(config, run / "adapter", "which colour?", [picture]), str)
    merged = export_run(run, "merged", dtype="f32").folder
    assert saved_shirg(AutoConfig.from_pretrained(merged)) == config.shirg


def test_a_whole_model_tells_by_which_views_it_was_trained(
    settings: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    own = saved_pair("paligemma", tmp_path / "paligemma")
    plain = [one for one in settings if not one.startswith(("lora.", "model="))]
    whole = ("method=full", f"model={own}", "training.max_steps=1", "samples.held_out=2")
    _, run = train(plain, *SMALL, *whole)
    config = load_config(run / "config.yaml", [])
    assert saved_shirg(AutoConfig.from_pretrained(run / "model")) == config.shirg
    picture = next((run / "pictures").iterdir())
    assert isinstance(ask(config, run / "model", "which colour?", [picture]), str)


def test_what_does_not_fit_is_found_before_anything_is_trained(
    settings: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    with pytest.raises(RequestError, match=r"shirg.size=60: .* patches of 14 pixels"):
        train(settings, *SMALL, "shirg.size=60")
    assert not list(tmp_path.rglob("adapter_model.safetensors"))
