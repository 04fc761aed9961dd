"""Workers make the batches that the process itself would make, and never touch a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from picture_rows import drawn, question
from tiny_processors import tiny_pair, tiny_processor
from trimtab import virtual_gpus
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.pictures import Picture, PictureRow
from trimtab.recipes.picture_trainer import answers_alone


@pytest.fixture
def rows(tmp_path: Path) -> list[PictureRow]:
    """Pictures in files and in memory, and rows without any."""
    Image.new("RGB", (50, 30), "blue").save(tmp_path / "blue.png")
    file = Picture(tmp_path / "blue.png", "blue.png")
    return [
        question("which colour?", "blue", file),
        question("which colour is it?", "red it is", drawn()),
        question("how many?", "three"),
        question("how many bars are there?", "two", file),
        question("what is this?", "a round thing", drawn(30, 60, "green")),
    ]


def batches(rows: Sequence[PictureRow], collate: Callable[[Any], Any], workers: int, how: str) -> list[Any]:
    options = {"multiprocessing_context": how} if workers else {}
    return list(DataLoader(rows, batch_size=2, collate_fn=collate, num_workers=workers, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", ["llava_onevision", "qwen3_vl", "idefics3"])
def test_two_forked_workers_make_the_same_batches(model_type: str, rows: list[PictureRow]) -> None:
    model, processor = tiny_pair(model_type)
    collate = answers_alone(model, PictureCollator(processor))
    here = batches(rows, collate, 0, "fork")
    there = batches(rows, collate, 2, "fork")
    assert len(here) == len(there) == 3
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
def test_spawned_workers_make_the_same_batches(rows: list[PictureRow]) -> None:
    """As on macOS and Windows: the collator and the rows travel by pickle."""
    collate = PictureCollator(tiny_processor("llava_onevision"))
    for one, other in zip(batches(rows, collate, 0, ""), batches(rows, collate, 1, "spawn"), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class OntoTheGPU(PictureCollator):
    """What a collator must not do."""

    def __call__(self, rows: Sequence[PictureRow]) -> Any:
        return {name: tensor.to("cuda") for name, tensor in super().__call__(rows).items()}


def test_a_forked_worker_touches_no_gpu(rows: list[PictureRow]) -> None:
    """CUDA is up before the fork, as in a run: a worker that used it would be told so."""
    processor = tiny_processor("qwen3_vl")
    with virtual_gpus(1):
        torch.ones(1, device="cuda")
        made = batches(rows, PictureCollator(processor), 1, "fork")
        assert all(tensor.device.type == "cpu" for batch in made for tensor in batch.values())
        with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
            batches(rows, OntoTheGPU(processor), 1, "fork")


def test_an_error_in_a_worker_names_the_row(rows: list[PictureRow], tmp_path: Path) -> None:
    (tmp_path / "blue.png").write_bytes(b"not a picture")
    with pytest.raises(Exception, match=r"blue\.png"):
        batches(rows, PictureCollator(tiny_processor("llava_onevision")), 2, "fork")
