"""The built-in model's folder, where a config's rehearsal needs it and it is not there yet: it is made before anything
is virtual, and kept. Within a rehearsal it would be thrown away each time, and by shapes it could not be made at all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab.config import load_request
from trimtab.config.flags import as_words
from trimtab.models import builtin
from trimtab.models.folder_files import has_tokenizer
from trimtab.models.shape_names import is_shape
from trimtab.rehearse.launch_lines import is_config


def make_ready(words: Sequence[str], *, shapes_only: bool) -> None:
    """Make it in a process of its own: torch stays out of this one. Where that fails, the rehearsal tells why."""
    if _is_needed(words, shapes_only=shapes_only) and not builtin.is_there():
        code = "from trimtab.models import builtin; builtin.builtin_folder()"
        subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False)


def _is_needed(words: Sequence[str], *, shapes_only: bool) -> bool:
    """`words`: what is to be rehearsed, a config first; any other program makes for itself what it needs."""
    if not words or not is_config(Path(words[0])) or not Path(words[0]).is_file():
        return False
    name = load_request(Path(words[0]), as_words(words[1:])).config.model.name
    if name == builtin.NAME or is_shape(name):
        return True
    folder = Path(name).expanduser()
    return shapes_only and folder.is_dir() and not has_tokenizer(folder)
