"""A batch without pictures uses the vision tower all the same, so that processes never wait for each other.

DDP waits until every trained parameter has a gradient on every process, FSDP2 until every process asks for the same
shards in the same order: a process with a batch of text alone would leave the others waiting at the tower for ever.
Here the tower and the connector then see one small picture, by the model's own processor and `get_image_features`, and
the sum of none of their features (nought, whatever they are; their gradients are noughts too) is added to the text's
embeddings. That is the place and the order in which a real picture enters, inside the wrapped forward pass: under
autocast, checkpointing and the wrapper's hooks, whatever loss is computed from the outputs.

In a single process it does the same, so that one process and two take the same steps: an optimizer moves a weight with
a gradient of noughts (momentum, decay), and leaves one without a gradient alone.

It changes no output, and hides no missing picture: image tokens without pictures are the model's to judge.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError
from trimtab.models.outputs import nothing_of
from trimtab.models.picture_features import METHOD, innermost, picture_arguments
from trimtab.placement import bare_model, move

if TYPE_CHECKING:
    from torch import Tensor, nn

SIDE = 32
"""Of the picture in pixels; a processor makes it as large as its model needs."""
# By these a processor cuts one picture into many; one view goes through the same layers as all of them.
_CUTTING = ("do_image_splitting", "do_pan_and_scan", "crop_to_patches")
# What the language model is given of `get_image_features`. The rest (hidden states before a layer that is left out)
# may come of weights that no picture trains.
_FEATURES = ("pooler_output", "deepstack_features")


def take_part(model: nn.Module, processor: Any) -> TakesPart:
    """Have the model's tower and connector take part in every batch. Before the model is wrapped; `remove()` undoes it.

    For runs whose rows are not all with pictures. Of a model whose tower nobody trains nothing is computed in vain:
    it only takes part where it is sharded.
    """
    bare = bare_model(model)
    if innermost(bare, METHOD) is None:
        raise RequestError.of(
            f"rows without pictures, and {type(bare).__name__} has no get_image_features",
            "its tower must take part in every batch, and this is how models of transformers let it run by itself",
            "drop the rows without pictures, or give the model's class a get_image_features(pixel_values, …)",
        )
    return TakesPart(bare, smallest_picture(processor))


def smallest_picture(processor: Any) -> dict[str, Any]:
    """What the processor makes of one small picture. Not of one colour: some models take that for padding."""
    from PIL import Image

    pictures = getattr(processor, "image_processor", processor)
    whole = {name: False for name in _CUTTING if getattr(pictures, name, False)}
    picture = Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB")
    return dict(pictures(images=[picture], return_tensors="pt", **whole))


class TakesPart:
    """The hooks on one model: one sees whether a batch has pictures, one adds the tower's nought to its embeddings."""

    def __init__(self, model: Any, inputs: Mapping[str, Any]) -> None:
        self._model = model
        self._signature = inspect.signature(model.forward)
        taken = picture_arguments(model)
        self._inputs = {name: value for name, value in inputs.items() if name in taken}
        self._idle = False
        self._sharded: bool | None = None
        self._joining: Any = None
        self._hooks = [
            model.register_forward_pre_hook(self._look, with_kwargs=True),
            model.register_forward_hook(self._check),
        ]

    def remove(self) -> None:
        """Leave the model as it was."""
        self._leave()
        for hook in self._hooks:
            hook.remove()

    def _look(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        self._leave()
        given = self._signature.bind_partial(*args, **kwargs).arguments if args else kwargs
        seen = any(_has_pictures(name, value) for name, value in given.items())
        if self._sharded is None:
            self._sharded = _is_sharded(self._model)
        # Shards are gathered in a forward pass without gradients as well.
        if not seen and (self._sharded or (torch.is_grad_enabled() and not self._idle)):
            # Only now, behind the hooks of the wrapper: FSDP2 would take the tower's graph for the embeddings' own.
            self._joining = self._model.get_input_embeddings().register_forward_hook(self._add)

    def _leave(self) -> None:
        if self._joining is not None:
            self._joining.remove()
            self._joining = None

    def _add(self, embeddings: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        import torch

        self._leave()
        # Looked up each time: a context of picture_features.py may stand in for it.
        features = getattr(innermost(self._model, METHOD), METHOD)(**move(self._inputs, embedded.device))
        noughts = torch.stack([nothing_of(part).to(embedded) for part in _used(features)])
        self._idle = not noughts.requires_grad
        return embedded + noughts.sum()

    def _check(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self._joining is not None:
            self._leave()
            raise RuntimeError(
                f"{type(model).__name__} did not embed the tokens of a batch without pictures by itself, so that its "
                "tower cannot take part in it; give it input_ids, not inputs_embeds"
            )


def _has_pictures(name: str, value: Any) -> bool:
    import torch

    if not name.startswith(("pixel_values", "mm_encoder_outputs", "image_embeds")) or value is None:
        return False
    return bool(value.numel()) if isinstance(value, torch.Tensor) else bool(len(value))


def _is_sharded(model: nn.Module) -> bool:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _used(features: Any) -> Iterator[Tensor]:
    """The tensors of `get_image_features` that the language model is given, however they are nested."""
    import torch

    if isinstance(features, torch.Tensor):
        if features.is_floating_point():
            yield features
    elif isinstance(features, Mapping):
        named = [features[name] for name in _FEATURES if features.get(name) is not None]
        for part in named or features.values():
            yield from _used(part)
    elif isinstance(features, (list, tuple)):
        for part in features:
            yield from _used(part)
