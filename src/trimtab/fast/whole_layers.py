"""Decoder layers of the common form, computed on a processor by the few functions of `layer_parts.py`.

The form is `x + o(attention(q, k, v of norm(x)))`, then `x + down(silu(gate) * up of norm(x))`, with rotated heads and
an adapter on every product. Whether a layer has it is tried on that very layer: what it gives, and all its gradients,
must come out the same; what its attention is asked for (a window, a scale) is heard in the trial and asked again. A
pass that the functions do not compute (a hook inside, dropout, other adapters, another number format) takes the layer's
own forward. Nothing that is saved changes, and a copy or a pickle of the model has plain layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.fast.blocks import bound
from trimtab.fast.layer_parts import Added, Gated, Linears, Norm, Read, Turned
from trimtab.fast.layer_trial import same_at_the_answers, why_not_its_own
from trimtab.fast.lora import Adapter, FastLinear, is_bare, plain_adapter
from trimtab.fast.reordered import Reordered

_LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")


class Whole:
    """Stands in a decoder layer's own dictionary as its `forward`."""

    opened_by = "speed.adapters=plain"
    """By this mark a witness leaves the inside alone: under its hooks a start's first step would be rounded otherwise
    than the same step of a run that was not interrupted."""
    last = False
    """Whether it is the model's last layer, of which nothing is needed but the places that tell an answer."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.plain = layer, layer.forward
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        self._groups: list[list[Any]] = [
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ]
        self._kept = [Reordered(copies=0) for _ in self._groups]
        self.norms = [getattr(layer, name) for name in _NORMS]
        self._watched = [
            attention,
            mlp,
            *self.norms,
            *(linear for group in self._groups for linear in group),
        ]
        self.asked: dict[str, Any] = {}
        """What its attention asks of the function that computes it, besides what a pass gives."""

    def kept(self) -> Iterator[tuple[Reordered, Sequence[torch.Tensor]]]:
        for kept, group in zip(self._kept, self._groups, strict=True):
            yield kept, [linear.base_layer.weight for linear in group]

    def __call__(self, hidden_states: Any, *args: Any, answer_rows: Any = None, **given: Any) -> Any:
        found = None if args else self._means(hidden_states, given)
        answers = answer_rows if self.last else None
        if found is None:
            out = self.plain(hidden_states, *args, **given)
            return out if answers is None else _picked(out.flatten(0, 1), answers)[None]
        return self._computed(hidden_states, *found, answers=answers, **given)

    def _means(
        self, hidden: Any, given: dict[str, Any]
    ) -> tuple[list[Linears], list[list[torch.Tensor]]] | None:
        """The products and their adapters' factors; None where this pass is not for them."""
        turn = given.get("position_embeddings")
        if not _plain_values(hidden) or hidden.dim() != 3 or torch.is_autocast_enabled("cpu"):
            return None
        if not isinstance(turn, tuple) or len(turn) != 2 or turn[0].shape[-1] != self.attention.head_dim:
            return None
        if _attention_of(self.attention.config) is None:
            return None
        if not all(map(_untouched, self._watched)) or any(norm.weight.requires_grad for norm in self.norms):
            return None
        linears, factors = [], []
        for kept, group in zip(self._kept, self._groups, strict=True):
            adapters = [plain_adapter(linear) for linear in group]
            if not all(map(_taken, group, adapters)):
                if any(linear.merged for linear in group):
                    kept.forget()
                return None
            bases = [linear.base_layer for linear in group]
            scales = tuple(adapter.scale for adapter in adapters if adapter)
            biases = [base.bias for base in bases if base.bias is not None]
            linears.append(Linears([base.weight for base in bases], kept, scales, biases))
            factors.append([a.a for a in adapters if a] + [a.b for a in adapters if a])
        return linears, factors

    def _computed(
        self,
        hidden: torch.Tensor,
        linears: list[Linears],
        factors: list[list[torch.Tensor]],
        *,
        answers: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **given: Any,
    ) -> torch.Tensor:
        attention = self.attention
        places, size = hidden.shape[:-1], attention.head_dim
        rows = hidden.reshape(-1, hidden.shape[-1])
        query, key, value = self._heads(rows, linears[0], factors[0], places, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        attend = _attention_of(attention.config)
        asked = {**self.asked, **given, "dropout": 0.0}
        seen, _ = attend(attention, query, key, value, attention_mask, **asked)
        seen = seen.reshape(-1, query.shape[1] * size)
        if answers is not None:
            seen, rows, places = _picked(seen, answers), _picked(rows, answers), torch.Size((1, len(answers)))
        rows = Added.apply(rows, seen, linears[1], *factors[1])
        out: torch.Tensor = Gated.apply(
            rows, _norm(self.norms[1]), linears[2], linears[3], *factors[2], *factors[3]
        )
        return out.view(*places, -1)

    def _heads(
        self,
        rows: torch.Tensor,
        linears: Linears,
        factors: list[torch.Tensor],
        places: torch.Size,
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values: `[batch, heads, tokens, size]`."""
        attention = self.attention
        size = attention.head_dim
        widths = [weight.shape[0] for weight in linears.weights]
        cos, sin = (part.unsqueeze(2) for part in turn)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        if norms != [None, None]:
            parts = Read.apply(rows, _norm(self.norms[0]), linears, widths, *factors)
            query, key, value = (part.view(*places, -1, size) for part in parts)
            query, key = (
                Turned.apply(part if norm is None else norm(part), cos, sin)
                for part, norm in zip((query, key), norms, strict=True)
            )
        else:
            # Queries and keys lie side by side, and are turned as one.
            joint = [widths[0] + widths[1], widths[2]]
            parts = Read.apply(rows, _norm(self.norms[0]), linears, joint, *factors)
            both, value = (part.view(*places, -1, size) for part in parts)
            query, key = Turned.apply(both, cos, sin).split([widths[0] // size, widths[1] // size], 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        return bound, (self.plain.__func__, self.layer)


def use_whole_layers(model: nn.Module) -> tuple[int, dict[str, int]]:
    """Have every decoder layer of that form computed so: how many are, and for which reasons how many are not."""
    changed, refused = 0, Counter[str]()
    for layer in model.modules():
        if _has_the_form(layer):
            whole = Whole(layer)
            if why := why_not_its_own(whole):
                refused[why] += 1
            else:
                layer.forward = whole
                changed += 1
    return changed, refused


def whole_layers(model: nn.Module) -> Iterator[tuple[nn.Module, Whole]]:
    for module in model.modules():
        if isinstance(whole := vars(module).get("forward"), Whole):
            yield module, whole


def pick_answers(bare: Any, device: torch.device) -> None:
    """Have the last layer compute what follows its attention at the places of answers alone, where all that the model
    does behind it is done to each place by itself: which is tried."""
    for layer, whole in list(whole_layers(bare))[-1:]:
        # A plain attribute: it shows in no state dict, and a copy of the model has its own layer there.
        bare.__dict__["answering_layer"] = layer
        whole.last = same_at_the_answers(bare, whole, device)


def picks_answers(bare: nn.Module) -> bool:
    """Whether the model takes `answer_rows`, and then gives hidden states at these places alone."""
    layer = vars(bare).get("answering_layer")
    whole = None if layer is None else vars(layer).get("forward")
    return isinstance(whole, Whole) and whole.last


def _has_the_form(layer: Any) -> bool:
    if "forward" in vars(layer) or not all(isinstance(getattr(layer, n, None), nn.Module) for n in _NORMS):
        return False
    linears: list[Any] = [
        getattr(getattr(layer, part, None), name, None) for part, names in _LINEARS.items() for name in names
    ]
    return (
        all(isinstance(linear, FastLinear) and _taken(linear, plain_adapter(linear)) for linear in linears)
        and all(_eps(getattr(layer, name)) is not None for name in _NORMS)
        and all(hasattr(layer.self_attn, name) for name in ("head_dim", "config"))
    )


def _taken(linear: Any, adapter: Adapter | None) -> bool:
    """Whether the product of this layer can be made for it."""
    base = linear.base_layer
    return (
        adapter is not None
        and not adapter.drops
        and is_bare(base)
        and all(_plain_values(weight) for weight in (base.weight, adapter.a, adapter.b))
        and (base.bias is None or (_plain_values(base.bias) and not base.bias.requires_grad))
    )


def _plain_values(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _untouched(module: nn.Module) -> bool:
    """Nobody listens to it, and nobody has put another forward in its place."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, _eps(module) or 0.0)


def _eps(module: Any) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(found := getattr(module, name, None), float):
            return found
    return None


def _picked(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, places)


def _attention_of(config: Any) -> Any:
    """None where it is the model's own (eager)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
