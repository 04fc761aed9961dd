"""The mark of a run's folder: the list of what the run wrote into it, which is all that a later run may move aside.

Nothing here deletes, follows a link, or touches a name that is not on the list.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.files import write_json_whole
from trimtab.reading import parse_json, read_text

MARK = ".trimtab-run.json"
LOCK = ".trimtab-lock"
"""What a run holds while it goes on (run_lock.py). Never on the list: a lock that is moved is none."""
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a run's folder says of itself."""

    entries: tuple[str, ...] = ()
    """Names in the folder that the run wrote, or is about to write."""
    began: bool = False
    """False for a run that failed before it began: it left nothing but the reason."""
    started: float = 0.0
    """When the run began, or last went on."""
    moving_to: str | None = None
    """Where a move that has not ended puts the run."""

    @classmethod
    def of(cls, folder: Path) -> Mark | None:
        """The folder's mark; None for a folder without one that this version understands: it is not ours to judge."""
        try:
            found = parse_json(read_text(folder / MARK))
            if found["format"] != FORMAT or not all(
                map(_is_plain, [*found["entries"], found["moving_to"] or "x"])
            ):
                return None
            return cls(
                tuple(found["entries"]), found["began"] is True, float(found["started"]), found["moving_to"]
            )
        except (FileNotFoundError, NotADirectoryError, RequestError):
            return None
        except (ValueError, TypeError, LookupError, OverflowError):
            return None

    def write(self, folder: Path) -> None:
        about = {"format": FORMAT, "host": platform.node(), "pid": os.getpid()}
        write_json_whole(folder / MARK, about | dataclasses.asdict(self))

    def present(self, folder: Path) -> list[str]:
        """What is on the list and still there."""
        return [name for name in self.entries if not is_free(folder / name)]

    def holds_a_run(self, folder: Path) -> bool:
        """Whether there is more of it than the reason why it never began."""
        return self.began and bool(self.present(folder))


def claim(folder: Path, *names: str) -> None:
    """Put names on a marked folder's list before they are written. What is there already is somebody else's."""
    with _one_at_a_time(folder):  # a report of a run that goes on adds to the list beside the run itself
        mark = Mark.of(folder)
        if mark is None:
            return
        new = tuple(n for n in names if n not in mark.entries and is_free(folder / n))
        if new:
            dataclasses.replace(mark, entries=mark.entries + new).write(folder)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep others from changing the list, where the system can; a lock of somebody else's is not waited for long."""
    if sys.platform == "win32" or not folder.is_dir():
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(50):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break  # not on this file system
        yield
    finally:
        os.close(handle)


def is_free(path: Path) -> bool:
    """Whether nothing is there that could be lost: no file, no link, no folder with anything in it."""
    if path.is_dir() and not path.is_symlink():
        return not any(path.iterdir())
    return not os.path.lexists(path)


def move_aside(folder: Path, mark: Mark) -> Path:
    """Move what is on the list into a new folder inside this one, and say where.

    There every move is a rename: it needs no room on the disk and nobody else's permission, and a kill leaves each
    file in the one place or the other. The list is copied first and a move that was cut short is taken up again, so
    that the earlier run ends up whole.
    """
    names = mark.present(folder)
    aside = folder / mark.moving_to if mark.moving_to else None
    if aside is None or any(os.path.lexists(aside / name) for name in names):
        stem = time.strftime("replaced-%Y%m%d-%H%M%S")
        tried = (folder / (stem if n == 1 else f"{stem}-{n}") for n in itertools.count(1))
        aside = next(path for path in tried if not os.path.lexists(path))
    try:
        dataclasses.replace(mark, moving_to=aside.name).write(folder)
        dataclasses.replace(mark, moving_to=None).write(aside)
        for name in names:
            _move(folder / name, aside / name)
    except OSError as error:
        raise RequestError.of(
            f"overwrite=true: the earlier run in {folder} could not be moved aside ({error})",
            f"nothing of it is lost: what was moved is in {aside}, and the next overwrite=true goes on with the rest",
            "mend what stands in the way, or choose another output_dir",
        ) from error
    return aside


def _move(source: Path, target: Path) -> None:
    if source.is_symlink():
        # The link, not what it points to; from another folder a relative one would lead elsewhere.
        target.symlink_to(source.parent.absolute() / os.readlink(source))
        source.unlink()
    else:
        source.rename(target)


def _is_plain(name: str) -> bool:
    """Whether this is a name in the folder itself: a list changed by hand must not lead out of it."""
    return name == Path(name).name and name not in ("..", MARK, LOCK)
