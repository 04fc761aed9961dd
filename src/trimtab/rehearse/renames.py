"""Renames and links that the real file system allows and an overlay does not (EXDEV): done by a copy instead.

Two overlaid folders of one mount are two file systems to the kernel, and a folder of the lower layer cannot be renamed.
What would fail on the real files too still fails.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from typing import Any


def across(apart: dict[str, str]) -> None:
    """From now on. `apart`: the overlaid folders, and the mount that each really lies on."""
    if not apart:
        return
    for name, instead in (("rename", _move), ("replace", _move), ("link", shutil.copy2)):
        setattr(os, name, _forgiving(getattr(os, name), instead, apart))


def _forgiving(
    real: Callable[..., None], instead: Callable[..., Any], apart: dict[str, str]
) -> Callable[..., None]:
    @functools.wraps(real)
    def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        try:
            real(src, dst, *args, **kwargs)
        except OSError as error:
            # With a folder's handle the paths say too little.
            named = not any(
                isinstance(value, int) and not isinstance(value, bool) for value in kwargs.values()
            )
            if error.errno != errno.EXDEV or not named or _mount(src, apart) != _mount(dst, apart):
                raise
            instead(os.fsdecode(src), os.fsdecode(dst))

    return call


def _mount(path: Any, apart: dict[str, str]) -> str | None:
    """The mount beneath the overlay that a path lies in."""
    path = os.path.join(os.path.realpath(os.path.dirname(os.fsdecode(path))), "")
    inside = [root for root in apart if path.startswith(os.path.join(root, ""))]
    return apart[max(inside, key=len)] if inside else None


def _move(src: str, dst: str) -> None:
    """As rename does: a file takes a file's place, a folder that of an empty one."""
    if os.path.isdir(src) and not os.path.islink(src):
        if os.path.isdir(dst):
            os.rmdir(dst)
        shutil.copytree(src, dst, symlinks=True)
        shutil.rmtree(src)
        return
    if os.path.isdir(dst):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), src, None, dst)
    if os.path.lexists(dst):
        os.unlink(dst)
    shutil.copy2(src, dst, follow_symlinks=False)
    os.unlink(src)
