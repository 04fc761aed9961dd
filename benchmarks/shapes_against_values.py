"""Memory by shapes beside memory by values: two training steps of every model that transformers' own tests make.

    git clone https://github.com/huggingface/transformers    # for its tests; the installed library is what runs
    pip install parameterized timeout-decorator httpx        # which the tests import
    python benchmarks/shapes_against_values.py run transformers --out found.jsonl
    python benchmarks/shapes_against_values.py table found.jsonl

No GPU is needed and none is compared with: both sides are virtual GPUs. By values every kernel computes, by shapes
nearly nothing does (floating-point tensors of more than a few numbers have none), and what both count has to be the
same. Each class is trained in processes of its own, forked from one that has imported the tests; a class that a test
cannot make here, or that fails by values too, is not judged.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import signal
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trimtab.virtual import shapes, unknown, virtual_gpus

WORKSPACES = 64 << 20
"""cuBLAS's, of the forward and of the backward pass; they would hide what tiny models differ by."""
VALUES = 64
"""So many floating-point numbers keep their values by shapes, in place of 65,536: the models are tiny."""
STEPS = 2
Test = type[unittest.TestCase]


def main() -> int:
    options = _options()
    if options.verb == "table":
        print(table([json.loads(line) for line in options.place.read_text().splitlines()]))
        return 0
    sys.path[:0] = [str(options.place.resolve()), str(options.place.resolve() / "utils")]
    models = options.place / "tests" / "models"
    wanted = options.models.split(",") if options.models else sorted(path.name for path in models.iterdir())
    with options.out.open("a") as out:
        for name in wanted:
            for path in sorted((models / name).glob("test_modeling_*.py")):
                for line in _of_file(name, path.stem, options.limit):
                    out.write(json.dumps(line) + "\n")
                    out.flush()
    return 0


def _of_file(model: str, file: str, limit: int) -> Iterator[dict[str, Any]]:
    try:
        module = _imported(f"tests.models.{model}.{file}")
    except Exception as error:  # whatever a test of another version asks for that is not here
        yield {
            "model": model,
            "class": file,
            "kind": "not judged",
            "why": f"{type(error).__name__}: {error}"[:200],
        }
        return
    for test in vars(module).values():
        if not (isinstance(test, type) and issubclass(test, unittest.TestCase)):
            continue
        for name in _classes(test):
            values = _forked(test, name, limit, by_shapes=False)
            line = {"model": model, "class": name, "values": values}
            if "failed" in values:
                yield line | {"kind": "not judged", "why": values["failed"]}
                continue
            found = _forked(test, name, limit, by_shapes=True)
            failed = "failed" in found
            same = not failed and found["peaks"] == values["peaks"]
            yield line | {
                "shapes": found,
                "kind": "fails by shapes" if failed else "same" if same else "differs",
            }


def _imported(name: str) -> Any:
    """A module of tests; where it asks for a helper that the installed library does not have, without it."""
    for _ in range(30):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            lacking = re.match(r"cannot import name '(\w+)' from '(transformers[\w.]*)'", str(error))
            if lacking is None:
                raise
            setattr(importlib.import_module(lacking[2]), lacking[1], None)
    raise ImportError(f"{name} asks for too much that is not here")


def _classes(test: Test) -> list[str]:
    """The models that a test makes, if it makes any."""
    try:
        case: Any = test("setUp")
        case.setUp()
        return [found.__name__ for found in getattr(case, "all_model_classes", None) or ()]
    except Exception:  # a mixin, or a test of something else
        return []


def _forked(test: Test, name: str, limit: int, *, by_shapes: bool) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(limit)
        try:
            result = _trained(test, name, by_shapes=by_shapes)
        except BaseException as error:
            result = {"failed": f"{type(error).__name__}: {error}"[:300]}
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(said) if said else {"failed": f"ended with status {status}"}


def _trained(test: Test, name: str, *, by_shapes: bool) -> dict[str, Any]:
    """Peaks after each step, allocated and reserved, and whether a size or a branch hung on unknown values."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # which some of the tests switch on for all
    _seed(0)
    case: Any = test("setUp")
    case.setUp()
    kind = next(found for found in case.all_model_classes if found.__name__ == name)
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    inputs = case._prepare_for_class(inputs, kind, return_labels=True)
    if by_shapes:
        shapes.FLOATS = VALUES
    with virtual_gpus(1, memory=4 << 30, shapes=by_shapes) as machine:
        _seed(1)
        model = kind(config).to("cuda").train()
        for weight in model.parameters() if by_shapes else ():
            if weight.numel() > VALUES:
                unknown.forget(weight)
        batch = {
            name: tree_map_only(torch.Tensor, lambda t: t.to("cuda"), given) for name, given in inputs.items()
        }
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        peaks = []
        for step in range(STEPS):
            _seed(2 + step)
            _loss(model(**batch)).backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        asked = {one.how for one in machine.asked}
        return {"peaks": peaks, "hangs on values": bool(asked & {"shape", "decision"})}


def _loss(outputs: Any) -> torch.Tensor:
    loss = getattr(outputs, "loss", None)
    if loss is None:
        found = tree_leaves(outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs)
        loss = sum(one.float().mean() for one in found if isinstance(one, torch.Tensor) and one.requires_grad)
    return loss.mean() if loss.dim() else loss


def _seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: how many are the same, and those that are not."""
    counts = Counter(line["kind"] for line in lines)
    judged = len(lines) - counts["not judged"]
    apart = [(_apart(line), line) for line in lines if line["kind"] == "differs"]
    near = sum(abs(share) <= 0.01 for share, _ in apart)
    text = [
        f"{judged} classes: {counts['same']} with the same peaks to the byte, {near} more within 1 %, "
        f"{len(apart) - near} further apart, {counts['fails by shapes']} fail by shapes alone; "
        f"{counts['not judged']} not judged.",
        "",
        "| model | class | by shapes | hangs on values |",
        "|---|---|---|---|",
    ]
    for share, line in sorted(apart, key=lambda pair: -abs(pair[0])):
        if abs(share) > 0.01:
            hangs = "yes" if line["shapes"]["hangs on values"] else ""
            text.append(f"| {line['model']} | {line['class']} | {share:+.1%} | {hangs} |")
    for line in lines:
        if line["kind"] == "fails by shapes":
            said = line["shapes"]["failed"].split("\n")[0].replace("|", "/")
            text.append(f"| {line['model']} | {line['class']} | {said[:120]} | |")
    return "\n".join(text)


def _apart(line: dict[str, Any]) -> float:
    """How far the peaks are apart, of what is not cuBLAS's; the further of both steps."""
    pairs = zip(line["values"]["peaks"], line["shapes"]["peaks"], strict=True)
    shares = [(found - true) / max(1, true - WORKSPACES) for (true, _), (found, _) in pairs]
    return max(shares, key=abs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("run", "table"))
    parser.add_argument("place", type=Path, help="transformers' repository; for table: what was found")
    parser.add_argument("--models", help="folders of tests/models, by commas; otherwise all")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one class")
    parser.add_argument("--out", type=Path, default=Path("shapes-against-values.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
