"""Tries on a loaded model whether what `whole_layers.py` computes is what the model's own layers do.

It changes no weight, draws no random number of the run's, and leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.fast.proof import short_rows, undisturbed

if TYPE_CHECKING:
    from trimtab.fast.whole_layers import Whole

_NAME = "trimtab_tried"
_TOKENS = 7
_CLOSE = 1e-4
"""Of the size of what comes out: rounding in another order."""


def why_not_its_own(whole: Whole) -> str:
    """Why the layer does not give what it did, with the same gradients; nothing where it does. `whole` is told what its
    attention asks for."""
    try:
        return _why_not_its_own(whole)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a layer of any kind may fail by any error: then it stays as it is
        said = (str(error).splitlines() or [""])[0]
        return f"tried, it fails ({type(error).__name__}: {said[:120]})"


def same_at_the_answers(bare: Any, whole: Whole, device: torch.device) -> bool:
    """Whether the model gives the same where its last layer goes on at some places alone."""
    ids = torch.tensor([short_rows(bare.config.get_text_config())[0]], device=device)
    rows = torch.arange(0, ids.shape[1], 2, device=device)
    try:
        with undisturbed(bare):
            due = bare.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, rows]
            whole.last = True
            made = bare.base_model(input_ids=ids, use_cache=False, answer_rows=rows).last_hidden_state[0]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an architecture of any kind may fail by any error: then all places are computed
        return False
    finally:
        whole.last = False
    return made.shape == due.shape and _same(made, due)


def _why_not_its_own(whole: Whole) -> str:
    layer, attention, weight = whole.layer, whole.attention, whole.norms[0].weight
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TOKENS, len(weight), generator=draw)
    # Any numbers will do, the two halves apart from each other.
    turn = torch.randn(2, 1, _TOKENS, attention.head_dim, generator=draw).unbind()
    trained = [p for p in layer.parameters() if p.requires_grad]
    heard: list[dict[str, Any]] = []
    found = []
    with _attending(attention.config, heard), _in_training(layer):
        for forward in (whole.plain, whole):
            x = hidden.clone().requires_grad_()
            out = forward(x, attention_mask=None, position_embeddings=turn)
            if not isinstance(out, torch.Tensor) or out.shape != hidden.shape:
                return "it gives something else than the hidden states"
            if len(heard) != 1:
                return f"it asks for attention {len(heard)} times"
            asked = heard.pop()
            if forward is whole.plain:
                if asked.pop("dropout", 0.0):
                    return "its attention drops weights"
                if own := [name for name, value in asked.items() if not _constant(value)]:
                    return f"its attention is given {', '.join(own)}"
                whole.asked = asked
            slopes = torch.autograd.grad(out.square().sum(), [x, *trained], allow_unused=True)
            found.append([out.detach(), *slopes])
    same = list(map(_same, *found))
    if all(same):
        return ""
    return "its results come out otherwise" if not same[0] else "its gradients come out otherwise"


def _constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _same(found: torch.Tensor | None, due: torch.Tensor | None) -> bool:
    if found is None or due is None:
        return found is due
    return bool((found - due).norm() <= _CLOSE * due.norm())


@contextmanager
def _attending(config: Any, heard: list[dict[str, Any]]) -> Iterator[None]:
    """While it is open attention is causal, and notes what it was asked for."""
    from transformers import AttentionInterface

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **asked: Any) -> Any:
        heard.append(asked)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=asked.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2), None

    AttentionInterface.register(_NAME, attend)
    own = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own


@contextmanager
def _in_training(layer: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in layer.modules()]
    layer.train()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
