"""From the pixels of SHIRG's two views to the tokens that stand for a picture in the language model.

Works on the parts of a LLaVA-like model (tower, connector); knows nothing of text but the question's mean embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.models import shirg_scores as scores

if TYPE_CHECKING:
    from trimtab.config.vision import ShirgSettings
    from trimtab.models.shirg_grid import Grid


@dataclass(frozen=True)
class Seen:
    """What the tower made of a batch of pictures."""

    whole: torch.Tensor
    """Tokens of the whole view, (pictures, N, D)."""
    fovea: torch.Tensor
    """Those of the foveal view."""
    readings: torch.Tensor
    """Attention that the foveal tokens are paid, (pictures, readings, N), float32: by each head of the tower's pooling
    head where it has one; else by the mean token: among the tokens themselves, before that in each layer if asked."""
    pooling_head: bool

    @property
    def attention(self) -> torch.Tensor:
        return self.readings.mean(1) if self.pooling_head else self.readings[:, -1]


@dataclass(frozen=True)
class Look:
    """What becomes of a batch of pictures, and why."""

    tokens: torch.Tensor
    """What stands for each picture in the language model, (pictures, tokens, its width): the whole view first."""
    kept: torch.Tensor
    """Which foveal tokens were kept, in raster order, (pictures, keep)."""
    score: torch.Tensor
    parts: dict[str, torch.Tensor]
    """What the score is made of, each (pictures, N), as measured."""


def look(
    inner: Any, settings: ShirgSettings, grid: Grid, pixels: torch.Tensor, question: torch.Tensor | None
) -> Look:
    """All views of the batch through the tower at once, through the connector at once, and the best foveal tokens.

    `pixels` are (pictures, 2, 3, size, size), `question` the mean embedding of each picture's question.
    """
    seen = through_tower(inner, pixels, every_layer=settings.noise is not None)
    projected = inner.multi_modal_projector(torch.cat([_pooled(seen.whole, grid), seen.fovea], 1))
    whole, fovea = projected[:, : grid.pooled], projected[:, grid.pooled :]
    with torch.no_grad(), torch.autocast(fovea.device.type, enabled=False):
        parts = _parts(settings, grid, seen, pixels[:, 1], fovea, question)
        score = _score(settings, grid, seen, parts)
        if settings.merge is None:
            kept, members = scores.choose(score, grid.keep), None
        else:
            kept, members = scores.choose_merged(score, seen.fovea.float(), grid.keep, settings.merge)
    if members is None:
        fovea = fovea.gather(1, kept[..., None].expand(-1, -1, fovea.shape[-1]).to(fovea.device))
    else:
        fovea = members.to(fovea) @ fovea
    if inner.training and settings.token_dropout:
        # A dropped token's place stays, so that every picture has the same number of tokens.
        stays = torch.rand(kept.shape, device=fovea.device) >= settings.token_dropout
        fovea = fovea * stays[..., None]
    return Look(torch.cat([whole, fovea], 1), kept, score, parts)


def _pooled(tokens: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Averages of pool × pool neighbours, in raster order."""
    side = grid.side // grid.pool
    squares = tokens.reshape(len(tokens), side, grid.pool, side, grid.pool, tokens.shape[-1])
    return squares.mean((2, 4)).flatten(1, 2)


def _parts(
    settings: ShirgSettings,
    grid: Grid,
    seen: Seen,
    pixels: torch.Tensor,
    projected: torch.Tensor,
    question: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The parts of the score that have a weight, each (pictures, N) in float32. `pixels` are the foveal view's."""
    tokens = seen.fovea.detach().float()
    parts: dict[str, torch.Tensor] = {}
    if settings.attention:
        parts["attention"] = seen.attention
    if settings.similarity and question is not None:
        close = scores.similarity(projected.detach().float(), question.to(projected.device))
        parts["similarity"] = close.to(tokens.device)
    elif settings.similarity:
        parts["similarity"] = tokens.new_zeros(tokens.shape[:2])
    if settings.edges:
        parts["edges"] = scores.edges(pixels.to(tokens.device).float(), grid.patch)
    if settings.distance:
        parts["distance"] = scores.distance(tokens)
    return parts


def _score(settings: ShirgSettings, grid: Grid, seen: Seen, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The declared score of each foveal token, (pictures, N)."""
    place = gate = None
    if settings.radial != "none":
        place = scores.radial(grid.side, settings.radial_sigma, settings.radial, seen.readings)
    if settings.noise is not None:
        gate = scores.steady(seen.readings, settings.noise)
    return scores.total(parts, settings.model_dump(include=set(parts)), place=place, gate=gate)


def through_tower(inner: Any, pixels: torch.Tensor, *, every_layer: bool = False) -> Seen:
    """Both views of all pictures, in one pass; positions are interpolated to the views' grid.

    `every_layer`: without a pooling head, attention is read in each layer and not in the tokens alone.
    """
    tower = inner.vision_tower
    with _paid_by_head(tower) as paid:
        out = tower(
            pixels.flatten(0, 1), interpolate_pos_encoding=True, output_hidden_states=True, return_dict=True
        )
    layer = getattr(inner.config, "vision_feature_layer", None)
    if layer is None:
        tokens = out.last_hidden_state
    elif isinstance(layer, int):
        tokens = out.hidden_states[layer]
    else:
        tokens = torch.cat([out.hidden_states[one] for one in layer], -1)
    tokens = tokens.unflatten(0, pixels.shape[:2])
    whole, fovea = tokens.unbind(1)
    if paid:
        return Seen(whole, fovea, paid[0], pooling_head=True)
    with torch.no_grad(), torch.autocast(fovea.device.type, enabled=False):
        before = out.hidden_states[1:-1] if every_layer else ()
        layers = [*(states[1::2] for states in before), fovea]
        readings = torch.stack([scores.attention_to_mean(states.float()) for states in layers], 1)
    return Seen(whole, fovea, readings, pooling_head=False)


@contextmanager
def _paid_by_head(tower: Any) -> Iterator[list[torch.Tensor]]:
    """The attention of the tower's pooling head to the foveal tokens, (pictures, heads, N), taken while the tower runs.

    Inside its forward, because a sharded tower has its weights whole only then. Empty where there is no head.
    """
    paid: list[torch.Tensor] = []
    head = getattr(tower, "head", None)
    if head is None:
        yield paid
        return

    @torch.no_grad()
    def read(module: Any, args: tuple[Any, ...]) -> None:
        tokens = args[0][1::2].to(module.probe.dtype)  # every second view is a foveal one
        probe = module.probe.repeat(len(tokens), 1, 1)
        # Autocast would keep weights cast without a gradient, for the pass that needs one.
        with torch.autocast(tokens.device.type, enabled=False):
            _, weights = module.attention(
                probe, tokens, tokens, need_weights=True, average_attn_weights=False
            )
        paid.append(weights[:, :, 0].float())

    hook = head.register_forward_pre_hook(read)
    try:
        yield paid
    finally:
        hook.remove()
