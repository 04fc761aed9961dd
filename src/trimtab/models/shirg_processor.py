"""SHIRG's two views of a picture, and as many image tokens in the text. On the CPU, with Pillow and numpy alone.

The processor is the model's own in all but its pictures: same tokenizer, template, image token, mean and deviation.
"""

from __future__ import annotations

import copy
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
    own: Any = type(processor)
    made = copy.copy(processor)
    made.__class__ = _with_views(own)
    made.shirg_grid = grid
    made.shirg_centre = (settings.centre_x, settings.centre_y)
    made.shirg_crop = settings.crop
    attached = getattr(model_config, "shirg", None)
    check_processor(made, settings if attached is None else type(settings)(**attached), model_config)
    return made


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
    return picture.resize((size, size), how), picture.resize((size, size), how, box=box)


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


class _Views:
    """What differs from the model's own processor."""

    shirg_grid: Grid
    shirg_centre: tuple[float, float]
    shirg_crop: int
    image_processor: Any
    image_token: str

    def _process_images(self, images: Any, **_: Any) -> tuple[dict[str, Any], list[str]]:
        import numpy as np

        pictures = list(_flat(images))
        if not pictures:
            return {}, []
        own, grid = self.image_processor, self.shirg_grid
        seen = [
            two_views(one, grid.size, self.shirg_crop, self.shirg_centre, own.resample) for one in pictures
        ]
        pixels = np.stack([np.stack([_normalised(view, own) for view in views]) for views in seen])
        return {"pixel_values": pixels}, [self.image_token * grid.tokens] * len(pictures)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made when it is needed, so a pickle holds the model's own processor in its place.
        plain: Any = object.__new__(type(self).__bases__[1])
        plain.__dict__.update(self.__dict__)
        return _rebuilt, (plain,)


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


def _with_views(own: Any) -> Any:
    # It keeps the name of the model's own class: a saved processor is read by that name.
    return type(own.__name__, (_Views, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _rebuilt(plain: Any) -> Any:
    plain.__class__ = _with_views(type(plain))
    return plain
