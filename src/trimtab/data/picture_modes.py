"""From any mode that PIL gives an image to RGB of eight bits: what is seen must be what the file means.

Transparency is laid over white, sixteen bits are scaled, CMYK of both conventions and LAB become colours. Colour
profiles other than the mode's own are not applied, as in every processor that these pictures go to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from trimtab.data.clean import BadRow


def as_rgb(image: Image.Image, stored: str | None) -> Image.Image:
    """A loaded image as RGB. `stored` is the format of its file."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _over_white_where(image, _scaled(image)).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    if image.mode == "CMYK" and stored in ("JPEG", "MPO") and "adobe" not in image.info:
        # PIL takes every JPEG of four channels for Adobe's, which are stored inverted; this one is not.
        image = ImageChops.invert(image)
    if image.has_transparency_data:
        seen = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, seen).convert("RGB")
    return image.convert("RGB")


def _scaled(image: Image.Image) -> Image.Image:
    """Grey of more than eight bits as eight. PIL's own conversion would clip it, and show white."""
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise BadRow("picture holds values that are not finite numbers")
    low, high = float(values.min()), float(values.max())
    grey: NDArray[Any]
    if image.mode.startswith("I;16"):
        grey = values / 257
    elif image.mode == "I" and low >= 0 and high <= 65535:
        grey = values / 257  # how PIL gives sixteen bits of some formats
    elif image.mode == "F" and low >= 0 and high <= 1:
        grey = values * 255
    elif image.mode == "F" and low >= 0 and high <= 255:
        grey = values
    else:
        # 32-bit numbers have no white of their own: the darkest is black and the brightest white.
        grey = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return Image.fromarray(np.rint(grey).astype(np.uint8))


def _over_white_where(image: Image.Image, grey: Image.Image) -> Image.Image:
    """White where a PNG of sixteen bits names the value that is transparent."""
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return grey
    seen = np.array(grey)
    seen[np.asarray(image) == clear] = 255
    return Image.fromarray(seen)


def _from_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    turned = ImageCms.applyTransform(image, ImageCms.buildTransform(lab, srgb, "LAB", "RGB"))
    assert turned is not None, "only a transform in place gives none"
    return turned
