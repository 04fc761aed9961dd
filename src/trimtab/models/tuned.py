"""The model that a run tunes: loaded where the plan says, with its adapter, verified. It trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.config.schema import Config
from trimtab.models.adapters import add_lora
from trimtab.models.families import CAUSAL_LM, Family
from trimtab.models.load import load_model
from trimtab.placement import PlacementPlan, checkpoint_plainly, verify


def load_tuned(
    config: Config,
    plan: PlacementPlan,
    family: Family = CAUSAL_LM,
    fit: Callable[[Config, Any], None] | None = None,
) -> Any:
    """The model before the first step. An adapter starts from the seed alone, so that it can be made again.

    `fit` is done to the model before its adapter is added.
    """
    model: Any = load_model(config.model, plan, family)
    if fit is not None:
        fit(config, model)
    checkpoint_plainly(model)
    if config.method == "lora":
        torch.manual_seed(config.seed)
        model = add_lora(model, config.lora, family)
    verify(model, plan)
    return model
