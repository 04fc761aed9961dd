"""Weights of a checkpoint get into the model, all of them, or the run does not go on.

transformers saves a model by the names of its published files and reads a checkpoint by the names of its own code:
where these differ (many models that see), its trainer loads nothing, warns, and trains on from the base model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.errors import RequestError, some_of
from trimtab.placement import bare_model


def load_all(trainer: Any) -> None:
    """From now on a checkpoint that does not fill the model is read by `from_pretrained`, or refused."""
    from_checkpoint, from_best = trainer._load_from_checkpoint, trainer._load_best_model
    place: list[Path] = []

    def load(folder: str, *args: Any, **kwargs: Any) -> Any:
        place[:] = [Path(folder)]
        return from_checkpoint(folder, *args, **kwargs)

    def load_best() -> Any:
        place[:] = [Path(trainer.state.best_model_checkpoint)]
        return from_best()

    def judge(result: Any) -> None:
        model: Any = bare_model(trainer.model)
        if wrong := _unmet(model, result):
            wrong = _filled_otherwise(model, place[0], wrong)
        if wrong:
            raise RequestError.of(
                f"{place[0]}: its weights do not fill the model: {some_of(wrong, 3)}",
                "the run would go on from weights that are not its own",
                "resume with the model and the version of transformers that it was saved with",
            )

    trainer._load_from_checkpoint, trainer._load_best_model = load, load_best
    trainer._issue_warnings_after_load = judge


def _unmet(model: Any, result: Any) -> list[str]:
    """Names that were not filled, or that have no place; one that shares its tensor with a filled one is filled."""
    missing = {*result.missing_keys}
    tensors = model.state_dict()
    filled = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    empty = [name for name in missing if name in tensors and tensors[name].data_ptr() not in filled]
    return sorted([*empty, *result.unexpected_keys])


def _filled_otherwise(model: Any, folder: Path, wrong: list[str]) -> list[str]:
    """Read the weights as a published model's, by whatever names; tells what is still not met."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return wrong
    kind: Any = type(model)
    read, told = kind.from_pretrained(
        folder, config=model.config, dtype=model.dtype, use_safetensors=True, output_loading_info=True
    )
    unread = [*told["missing_keys"], *told["unexpected_keys"], *(key[0] for key in told["mismatched_keys"])]
    return sorted(unread) or _unmet(model, model.load_state_dict(read.state_dict(), strict=False))
