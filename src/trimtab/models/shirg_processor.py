"""SHIRG's two views of a picture, and as many image tokens in the text. On the CPU, with Pillow and numpy alone.

The processor is the model's own in all but its pictures: same tokenizer, template, image token, mean and deviation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError
from trimtab.models.shirg_grid import Grid, check_processor, grid_of

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from trimtab.config.vision import ShirgSettings


def shirg_processor(processor: Any, settings: ShirgSettings, model_config: Any) -> Any:
    """A processor of the same class and calling convention whose pixel_values are (pictures, 2, 3, size, size).

    It writes as many image tokens for a picture as the model that `attach_shirg` makes will put there. `processor`
    itself stays as it is. Where `model_config` is of a model that SHIRG is attached to, the two must agree.
    """
    grid = grid_of(settings, model_config)
    made = _as(copy.copy(processor), _Text)
    made.image_processor = _as(copy.copy(processor.image_processor), _Pictures)
    made.image_processor.shirg = Cut(grid, settings.crop, (settings.centre_x, settings.centre_y))
    attached = getattr(model_config, "shirg", None)
    check_processor(made, settings if attached is None else type(settings)(**attached), model_config)
    return made


@dataclass(frozen=True)
class Cut:
    """How pictures are cut into views."""

    grid: Grid
    crop: int
    centre: tuple[float, float]


def foveal_box(width: int, height: int, crop: int, centre: tuple[float, float]) -> tuple[int, int, int, int]:
    """The square that the foveal view takes, in pixels: inside the picture, and as wide as its shorter side at most."""
    side = min(crop, width, height)
    left = min(max(round(centre[0] * width - side / 2), 0), width - side)
    top = min(max(round(centre[1] * height - side / 2), 0), height - side)
    return left, top, left + side, top + side


def two_views(
    picture: Image.Image,
    size: int,
    crop: int,
    centre: tuple[float, float],
    resample: Any = None,
) -> tuple[Image.Image, Image.Image]:
    """The whole picture, and its foveal crop, both size × size."""
    from PIL import Image

    how = Image.Resampling.BICUBIC if resample is None else Image.Resampling(resample)
    picture = picture.convert("RGB")
    box = foveal_box(*picture.size, crop, centre)
    return picture.resize((size, size), how), picture.crop(box).resize((size, size), how)


def _normalised(view: Image.Image, pictures: Any) -> np.ndarray[Any, Any]:
    """One view as the tower's own image processor would give it: scaled, shifted, channels first."""
    import numpy as np

    values = np.asarray(view, dtype=np.float32)
    if pictures.do_rescale:
        values = values * np.float32(pictures.rescale_factor)
    if pictures.do_normalize:
        mean, deviation = (np.asarray(part, np.float32) for part in (pictures.image_mean, pictures.image_std))
        values = (values - mean) / deviation
    return np.ascontiguousarray(values.transpose(2, 0, 1))


class _Made:
    """A class of the model's own that is made when it is needed; a pickle holds the model's own in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        mixed, own = type(self).__bases__
        plain: Any = object.__new__(own)
        plain.__dict__.update(self.__dict__)
        return _as, (plain, mixed)


class _Pictures(_Made):
    """What differs from the model's own image processor."""

    shirg: Cut

    def __call__(self, images: Any, *_: Any, return_tensors: Any = None, **__: Any) -> Any:
        import numpy as np
        from transformers import BatchFeature

        cut = self.shirg
        how = getattr(self, "resample", None)
        seen = [two_views(one, cut.grid.size, cut.crop, cut.centre, how) for one in _flat(images)]
        pixels = [np.stack([_normalised(view, self) for view in views]) for views in seen]
        return BatchFeature({"pixel_values": np.stack(pixels)}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        # Saved as the model's own: what SHIRG was is kept in the model's config.
        plain: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {name: value for name, value in plain.items() if name != "shirg"}


class _Text(_Made):
    """What differs from the model's own processor."""

    image_processor: _Pictures
    image_token: str

    @property
    def shirg_grid(self) -> Grid:
        return self.image_processor.shirg.grid

    def _process_images(self, images: Any, **options: Any) -> tuple[Any, list[str]]:
        pictures = list(_flat(images))
        if not pictures:
            return {}, []
        made = self.image_processor(pictures, return_tensors=options.get("return_tensors"))
        return made, [self.image_token * self.shirg_grid.tokens] * len(pictures)


def _as(made: Any, mixed: type) -> Any:
    """The same object, of its own class with what `mixed` changes; the name stays, by which a saved one is read."""
    own: Any = type(made)
    made.__class__ = type(own.__name__, (mixed, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    return made


def _flat(images: Any) -> Any:
    from PIL import Image

    if isinstance(images, Image.Image):
        yield images
    elif isinstance(images, (list, tuple)):
        for one in images:
            yield from _flat(one)
    else:
        raise RequestError.of(
            f"a picture came as {type(images).__name__}",
            "SHIRG cuts its views from the picture as it is, before any other step",
            "give Pillow images (Image.open(path))",
        )
