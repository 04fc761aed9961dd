"""The Triton kernels without a GPU, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import torch
import transformers
from torch import nn
from zeroth_helpers import SIZES, TOKENS, tiny

PROGRAM = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.slow
def test_the_interpreted_kernels_agree_with_the_plain_code() -> None:
    # A process of its own: Triton decides at import whether it interprets.
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "all agree" in done.stdout


def test_a_window_over_all_layers_is_not_captured() -> None:
    """Mistral's config tells no kinds of layers, only a window, which a mask of ours would leave out."""
    from trimtab.zeroth.graph import _check_model
    from trimtab.zeroth.lane_modules import NotCapturable

    config = transformers.MistralConfig(**SIZES, **TOKENS, sliding_window=4)
    with pytest.raises(NotCapturable, match="sliding_attention"):
        _check_model(transformers.MistralForCausalLM(config), torch.device("cpu"))
    config.sliding_window = None
    _check_model(transformers.MistralForCausalLM(config), torch.device("cpu"))
    _check_model(tiny("qwen3"), torch.device("cpu"))


def test_distances_counted_in_the_mask_are_not_captured() -> None:
    from trimtab.zeroth.graph import _check_model
    from trimtab.zeroth.lane_modules import NotCapturable

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for alibi in (True, False):
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **TOKENS, alibi=alibi))
        if alibi:
            with pytest.raises(NotCapturable, match="biased by distances"):
                _check_model(model, torch.device("cpu"))
        else:
            _check_model(model, torch.device("cpu"))


class PlusOneNorm(nn.LayerNorm):
    """As Nemotron has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class TripledNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize(
    ("norm", "kind"), [(nn.LayerNorm(8), "norm"), (PlusOneNorm(8), "norm plus one"), (TripledNorm(8), None)]
)
def test_the_formula_of_a_norm_is_its_own(norm: nn.Module, kind: str | None) -> None:
    from trimtab.zeroth.lane_modules import NotCapturable, kind_of

    if kind is not None:
        assert kind_of(norm) == kind
        return
    with pytest.raises(NotCapturable, match="none of the known formulas"):
        kind_of(norm)
