"""What a model made of its pictures, used again: by both halves of a doubled batch, by every pass of a sampler.

A vision-language model of transformers takes its pictures through one method, `get_image_features`. While a context of
this file is open, that method answers with what the tower gave once. Never changes a weight, and leaves the model as
it was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

METHOD = "get_image_features"
_GIVEN = ("pooler_output", "deepstack_features")
"""The fields of its answer that a model reads: the tokens of the pictures, and those for deeper layers."""


def innermost(model: torch.nn.Module, method: str) -> Any | None:
    """The module whose own `method` the model's forward calls: an outer one of that name only passes on to it."""
    found = None
    for module in model.modules():
        if method in vars(module) or callable(getattr(type(module), method, None)):
            found = module
    return found


def picture_arguments(model: torch.nn.Module) -> frozenset[str]:
    """The inputs that describe pictures and not rows: what the model's `get_image_features` takes."""
    module = innermost(model, METHOD)
    return frozenset() if module is None else frozenset(inspect.signature(getattr(module, METHOD)).parameters)


@contextmanager
def pictures_repeated(model: torch.nn.Module, times: int) -> Iterator[None]:
    """The tower sees each picture once, and the language model gets its tokens `times` times, copy after copy.

    The order is that of a batch whose rows are repeated as a whole: first all rows, then all rows again.
    """

    def once(features: Callable[..., Any]) -> Callable[..., Any]:
        def repeat(*args: Any, **kwargs: Any) -> Any:
            return _repeated(features(*args, **kwargs), times)

        return repeat

    with _replaced(innermost(model, METHOD), once):
        yield


@contextmanager
def pictures_remembered(model: torch.nn.Module) -> Iterator[None]:
    """The tower runs in the first pass only. For passes over the same pictures, with the same weights."""

    def once(features: Callable[..., Any]) -> Callable[..., Any]:
        kept: list[Any] = []

        def remember(*args: Any, **kwargs: Any) -> Any:
            if not kept:
                kept.append(features(*args, **kwargs))
            return kept[0]

        return remember

    with _replaced(innermost(model, METHOD), once):
        yield


@contextmanager
def _replaced(
    module: Any | None, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    if module is None:
        yield
        return
    own = vars(module).get(METHOD)
    setattr(module, METHOD, change(getattr(module, METHOD)))
    try:
        yield
    finally:
        delattr(module, METHOD)
        if own is not None:
            setattr(module, METHOD, own)


def _repeated(features: Any, times: int) -> Any:
    """The features of `times` copies of the pictures; an answer of an unknown form is an error."""
    import torch

    if isinstance(features, torch.Tensor):
        return torch.cat([features] * times)
    if isinstance(features, list | tuple) and all(isinstance(part, torch.Tensor) for part in features):
        return features * times
    if isinstance(features, Mapping) and features.get(_GIVEN[0]) is not None:
        tokens, deeper = (features.get(name) for name in _GIVEN)
        features[_GIVEN[0]] = _repeated(tokens, times)  # type: ignore[index]
        if deeper is not None:
            features[_GIVEN[1]] = [_repeated(layer, times) for layer in deeper]  # type: ignore[index]
        return features
    raise TypeError(f"{METHOD} gave a {type(features).__name__}, whose pictures cannot be told apart")
