"""The pictures of the docs are made by the scripts beside them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
def test_shirgs_views_are_drawn(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("shirg_views", DOCS / "figures" / "shirg_views.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path, steps=2)
    drawn = sorted(file.name for file in tmp_path.iterdir())
    assert drawn == ["shirg-choice.png", "shirg-scores.png", "shirg-views.png"]
    for name in drawn:
        assert Image.open(tmp_path / name).size == Image.open(DOCS / "figures" / name).size


def test_every_picture_that_the_docs_show_is_there_and_small() -> None:
    shown = [
        DOCS / name
        for page in DOCS.glob("*.md")
        for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())
    ]
    assert DOCS / "figures" / "shirg-views.png" in shown
    for file in shown:
        assert file.stat().st_size < 60_000, file
