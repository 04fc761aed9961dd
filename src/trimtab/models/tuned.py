"""The model that a run tunes: loaded where the plan says, with its adapter, verified. It trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.config.schema import Config
from trimtab.models.adapters import add_lora
from trimtab.models.families import CAUSAL_LM, Family
from trimtab.models.load import load_model
from trimtab.models.unread import freeze_unread
from trimtab.placement import PlacementPlan, checkpoint_plainly, verify

Fit = Callable[[Config, Any], None]
"""What a recipe does to its model before an adapter is added."""


def fitted(config: Config, model: Any, fit: Fit | None) -> None:
    """Make the model what is tuned; where all its weights are, without those that no loss reads."""
    if fit is not None:
        fit(config, model)
    if config.method == "full":
        freeze_unread(model)


def load_tuned(
    config: Config, plan: PlacementPlan, family: Family = CAUSAL_LM, fit: Fit | None = None
) -> Any:
    """The model before the first step. An adapter starts from the seed alone, so that it can be made again."""
    model: Any = load_model(config.model, plan, family)
    fitted(config, model, fit)
    checkpoint_plainly(model)
    if config.method == "lora":
        torch.manual_seed(config.seed)
        model = add_lora(model, config.lora, family)
    verify(model, plan)
    return model
