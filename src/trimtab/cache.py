"""Where Trimtab keeps what it can make again: converted models and downloaded data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Where converted models and downloaded data are kept: $TRIMTAB_CACHE, else ~/.cache/trimtab."""
    return Path(os.environ.get("TRIMTAB_CACHE") or Path.home() / ".cache" / "trimtab")
