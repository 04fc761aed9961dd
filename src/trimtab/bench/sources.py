"""Which model a benchmark runs on, and whether the hub can be reached. What was asked for by name is never replaced.

Only a `--scale` whose Qwen3 is out of reach gives way to the built-in model, and then says so wherever its figures
are shown.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trimtab.data.tasks import Task
from trimtab.errors import RequestError
from trimtab.models.builtin import NAME as BUILT_IN

SCALES = {
    "small": "Qwen/Qwen3-0.6B",
    "medium": "Qwen/Qwen3-1.7B",
    "large": "Qwen/Qwen3-4B",
    "xlarge": "Qwen/Qwen3-8B",
}
DEFAULT_SCALE = "small"
_SECONDS = 5.0


@dataclass(frozen=True)
class ModelChoice:
    """The model that runs, the one that was meant, and why they differ if they do."""

    name: str
    asked: str
    note: str = ""

    @property
    def shown(self) -> str:
        """For every table: nobody is to take the built-in model's figures for another's."""
        title = (
            "smollm2 (built-in SmolLM2-135M-Instruct, dequantised)" if self.name == BUILT_IN else self.name
        )
        return f"{title}, in place of {self.asked}" if self.note else title


def choose_model(model: str | None, scale: str | None) -> ModelChoice:
    """`--model` as it is; else the Qwen3 of the scale if it is here or the hub answers; else the built-in one."""
    if scale is not None and scale not in SCALES:
        raise RequestError.of(
            f"--scale {scale}", f"the scales are {', '.join(SCALES)}", "name one of them, or give --model"
        )
    if model is not None and scale is not None:
        raise RequestError.of(
            f"--model {model} and --scale {scale}", "each names a model, and one is measured", "leave one out"
        )
    if model is not None:
        return ModelChoice(model, model)
    wanted = SCALES[scale or DEFAULT_SCALE]
    if in_model_cache(wanted) or hub_reachable():
        return ModelChoice(wanted, wanted)
    return ModelChoice(
        BUILT_IN,
        wanted,
        f"{wanted} is not on this machine and the hub cannot be reached: running the built-in smollm2 "
        f"(SmolLM2-135M-Instruct, dequantised) in its place; its figures are not those of {wanted}",
    )


@cache
def hub_reachable() -> bool:
    """Whether the hub answers at all, asked once. Any answer counts, an error page too."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def in_model_cache(name: str) -> bool:
    """Whether a hub model's weights were downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    there = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *_WEIGHTS)]
    return there[0] and any(there[1:])


def data_reachable(task: Task) -> bool:
    """Whether the hub's copy of a task can be read: the hub answers, or the set was downloaded before."""
    if hub_reachable():
        return True
    import datasets

    return (Path(datasets.config.HF_DATASETS_CACHE) / task.hub.replace("/", "___")).is_dir()


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
