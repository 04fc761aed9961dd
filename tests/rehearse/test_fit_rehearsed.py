"""What `trimtab fit` calls fitting is rehearsed clean on a GPU of that size; the next larger micro-batch is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import dump_config, load_request
from trimtab.config.schema import Config
from trimtab.hardware import Launcher, probe
from trimtab.hardware.catalogue import Card, cards
from trimtab.recipes.fitting import Search
from trimtab.recipes.trials import Trials

Rehearse = Callable[..., dict[str, Any]]


def asked(folder: Path) -> Config:
    """Eight rows a step, each longer than the 256 tokens that are taken of it."""
    rows = [{"prompt": f"Say {n}.", "completion": "word " * 400} for n in range(32)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *("model=smollm2", f"data.source={data}", "data.max_length=256", "data.too_long=truncate"),
        *("data.eval_fraction=0", "training.batch_size=8", "training.max_steps=10", "samples.prompts=[]"),
        *("speed.compile=false", "speed.kernels=plain", f"output_dir={folder / 'run'}"),
    ]
    return load_request(None, words).config


def searched(config: Config, card: Card, trials: Trials) -> Search:
    search = Search(config, 8, probe(Launcher(name="none")), trials, lambda text: None)
    search.on(card, (1,))
    return search


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_fits_is_rehearsed_clean_and_the_next_larger_is_not(rehearse: Rehearse, tmp_path: Path) -> None:
    config, card = asked(tmp_path), cards(["RTX-4090"])[0]
    with Trials() as trials:
        trials.begin()
        roomy = searched(config, card, trials)
        need = {option.micro_batch: option.needed for option in roomy.found.options}
        assert 8 in need
        # A GPU on which all rows at once do not fit, prompts trained on or not.
        size = int(need[8] * 0.8)
        small = replace(card.accelerator, total_bytes=size, free_bytes=size)
        found = searched(config, Card(card.key, small, card.model), trials).found
    # So small a model is bound by launches: eight rows at once that are computed again may be the quicker ones.
    best = next(option for option in found.options if option.way.kept == "all" and option.fits)
    assert (best.micro_batch, best.accumulation) == (4, 2)

    def rehearsed(settings: Config, name: str) -> dict[str, Any]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(dump_config(settings))
        told = {
            "gpus": 1,
            "memory_bytes": size,
            "gpu_name": card.accelerator.model,
            "capability": tuple(map(int, str(card.accelerator.capability).split("."))),
            "shapes_only": True,
            "max_steps": 2,
        }
        return rehearse(str(file), **told, timeout=300)

    clean = rehearsed(best.config, "fitted")
    assert clean["verdict"] == "clean", clean["text"]
    memory = clean["memory"]["cuda:0"]
    # The rows of a trial are trained on whole; of these, prompts are not.
    assert 0.9 * best.held.peak < memory["peak_bytes"] <= best.held.peak
    larger = best.config.training.model_copy(update={"batch_size": 8, "gradient_accumulation_steps": 1})
    fault = rehearsed(best.config.model_copy(update={"training": larger}), "larger")
    assert "out-of-memory" in {finding["kind"] for finding in fault["findings"]}, fault["text"]
