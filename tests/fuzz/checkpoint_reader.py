"""Checkpoints and what a run that goes on is compared with, damaged: those of a loop of our own and of a trainer.

Each with its manifest and without one, as earlier versions wrote them. A checkpoint that is found damaged is skipped
or refused; one that is taken must be readable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from damage import Damage


def checkpoints(folder: Path) -> Callable[[Damage, Any], object]:
    import torch
    from safetensors.torch import save_file

    from trimtab.config import load_config
    from trimtab.manifest import MANIFEST
    from trimtab.recipes.begun_with import GoingOn
    from trimtab.recipes.checkpoints import checkpoint_to_resume, new_checkpoint
    from trimtab.recipes.run_folder import RunFolder
    from trimtab.recipes.starts import FORMAT, STARTS, Start, read_starts
    from trimtab.recipes.zeroth_checkpoint import Progress, load_checkpoint, save_checkpoint

    was = load_config(None, ["recipe=sft", f"output_dir={folder}"])
    now = load_config(None, ["recipe=sft", f"output_dir={folder}", "training.resume=true", "epochs=9"])
    facts = {
        "plan": {
            "processes": 1,
            "step_rows": 8,
            "precision": "fp32",
            "weight_precision": "fp32",
            "sharded": False,
        },
        "train": {"rows": 9, "digest": "d"},
        "model": {"read": "m", "files": {"config.json": "d"}},
        "files": {"source": {"a.jsonl": {"bytes": 3}}},
        "rewards": {},
        "versions": {"torch": "2"},
    }
    start = Start(was, facts).as_dict()
    record = {"format": FORMAT, "began": start, "now": start, "went_on": []}
    run, model = RunFolder(folder), torch.nn.Linear(2, 2)
    own = save_checkpoint(run, model, {"forwards": 8}, Progress(step=3, taken=3))
    state = {"global_step": 2, "epoch": 1.0, "max_steps": 4, "log_history": [{"loss": 1.0, "step": 1}]}
    with new_checkpoint(run.checkpoints, 2) as trainers:
        (trainers / "trainer_state.json").write_text(json.dumps(state))
        save_file(dict(model.named_parameters()), trainers / "model.safetensors")
        optimizer = torch.optim.AdamW(model.parameters())
        torch.save(optimizer.state_dict(), trainers / "optimizer.pt")
        torch.save({"last_epoch": 2}, trainers / "scheduler.pt")
        torch.save({"cpu": torch.get_rng_state()}, trainers / "rng_state.pth")
    trainers = run.checkpoints / "checkpoint-2"
    whole = {
        kind: {file.name: file.read_bytes() for file in place.iterdir()}
        for kind, place in {"own": own, "trainers": trainers}.items()
    }
    plain = {"plan.json": {"processes": 1, "strategy": "single"}, "data.json": {"rows_train": 9}}

    def damaged(damage: Damage, name: str, content: bytes, value: Any) -> bytes:
        if not name.endswith(".json") or damage.random.random() < 0.3:
            return damage.raw(content)
        tree = json.loads(content)
        if damage.random.random() < 0.7:
            return damage.as_json(damage.tree(tree))
        return damage.as_json({**tree, damage.random.choice(list(tree)): value})

    def case(damage: Damage, value: Any) -> object:
        random = damage.random
        shutil.rmtree(run.checkpoints)
        kind = random.choice(list(whole))
        place = own if kind == "own" else trainers
        place.mkdir(parents=True)
        (folder / "config.yaml").write_text("recipe: sft\n")
        for name, tree in plain.items():
            (folder / name).write_bytes(damage.as_json(damage.tree(tree)))
        (folder / STARTS).write_text(json.dumps(record))
        names = [name for name in whole[kind] if name != MANIFEST or random.random() < 0.5]
        hurt = random.choice([*names, STARTS, STARTS])
        for name in names:
            content = whole[kind][name]
            (place / name).write_bytes(damaged(damage, name, content, value) if name == hurt else content)
        if hurt == STARTS:
            told = record
            if random.random() < 0.6:  # the settings are many, and hide the facts
                hurt_facts = damage.tree(facts) if random.random() < 0.7 else {**facts, "train": value}
                told = {**record, "now": {**start, "facts": hurt_facts}}
            (folder / STARTS).write_bytes(damaged(damage, hurt, json.dumps(told).encode(), value))
        elif random.random() < 0.3:
            (folder / STARTS).unlink()
        read_starts(folder)
        found = checkpoint_to_resume(now, run, lambda line: None)
        assert found is not None
        going = GoingOn.of(found)
        assert going is not None
        going.check_request(Start(now, {**facts, "versions": {"torch": "3"}}))
        return load_checkpoint(found, model) if kind == "own" else None

    return case
