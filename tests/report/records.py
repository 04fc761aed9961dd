"""Records as `trimtab rehearse --json` and `trimtab fit --json` write them, made by hand: what a page is made of."""

from __future__ import annotations

from typing import Any

GIB = 2**30
KINDS = ("weights", "gradients", "optimizer", "activations", "temporary", "cache", "workspace", "other")
SOURCE = """def train(model, loader, optimizer):
    device = next(model.parameters()).device
    for batch in loader:
        labels = batch["labels"]
        logits = model(batch["input_ids"].to(device)).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()""".splitlines()


def place(line: int, file: str = "/home/me/project/train.py") -> dict[str, Any]:
    return {"file": file, "line": line, "code": SOURCE[line - 21].strip() if 21 <= line < 30 else ""}


def device_memory(scale: float = 1.0) -> dict[str, Any]:
    """A step of 400 places: activations rise in the forward pass, fall in the backward pass."""
    at = [7 * n for n in range(400)]
    rise = [min(n, max(0, 330 - n)) / 200 * 21 for n in range(400)]
    kinds = {
        "weights": [15.2] * 400,
        "gradients": [0.0 if n < 200 else min(1.0, (n - 200) / 130) * 2.1 for n in range(400)],
        "optimizer": [4.2] * 400,
        "activations": rise,
        "temporary": [(1.9 if n % 9 == 4 else 0.3) if n < 330 else 0.4 for n in range(400)],
        "cache": [0.0] * 400,
        "workspace": [0.06] * 400,
        "other": [0.0] * 400,
    }
    held = {kind: [int(x * scale * GIB) for x in values] for kind, values in kinds.items()}
    totals = [sum(values[n] for values in held.values()) for n in range(400)]
    top = max(range(400), key=totals.__getitem__)
    at_peak = {kind: values[top] for kind, values in held.items()}
    library = "/home/me/.venv/lib/python3.12/site-packages/torch/nn/functional.py"

    def phase(name: str, share: float) -> dict[str, Any]:
        kept = ("weights",) if name == "load" else KINDS
        parts = {kind: int(at_peak[kind] * share) if kind in kept else 0 for kind in KINDS}
        peak = sum(parts.values())
        told = {"name": name, "peak_bytes": peak, "reserved_bytes": int(peak * 1.06), "kinds": parts}
        return {**told, "op": "aten::mm", "module": "model.layers.31.mlp", "where": place(25), "inside": None}

    return {
        "capacity_bytes": 80 * GIB,
        "peak_bytes": totals[top],
        "reserved_bytes": int(totals[top] * 1.06),
        "context_bytes": int(0.5 * GIB),
        "at_peak": {
            "kinds": at_peak,
            "phase": "steady step",
            "op": "aten::_log_softmax",
            "module": "model.lm_head",
            "where": place(26),
            "inside": {"file": library, "line": 3462, "code": "return torch._C._nn.cross_entropy_loss("},
        },
        "phases": [
            phase("load", 1.0),
            phase("first step", 0.97),
            phase("steady step", 1.0),
            phase("evaluate", 0.7),
            phase("save", 0.5),
        ],
        "timeline": {
            "phase": "steady step",
            "at": at,
            "kinds": held,
            "marks": [
                {"at": 0, "name": "forward"},
                {"at": 1400, "name": "backward"},
                {"at": 2350, "name": "optimizer"},
            ],
        },
    }


def rehearsal() -> dict[str, Any]:
    """A split model on two GPUs with a fault, a warning, and values that were not computed."""
    tensor = {"name": "labels", "device": "cpu", "dtype": "int64", "shape": [2, 512], "born": place(24)}
    layers = {f"model.layers.{n}": [f"cuda:{n // 16}"] for n in range(32)}
    return {
        "verdict": "fault",
        "findings": [
            {
                "kind": "device-mismatch",
                "severity": "fault",
                "message": "Expected all tensors to be on the same device, but found cuda:1 and cpu!",
                "where": place(26),
                "cause": {**place(24), "why": "`labels` is taken from the batch as it is, on the CPU"},
                "fix": 'labels = batch["labels"].to(device)',
                "op": "aten.nll_loss_forward",
                "module": "",
                "tensors": [tensor],
                "count": 3,
                "library": None,
                "edits": [],
                "tried": "gone",
                "follows": [],
            },
            {
                "kind": "no-gradient",
                "severity": "warning",
                "message": "model.score gets no gradient: the loss does not use it",
                "where": place(27),
                "cause": None,
                "fix": "leave it out of the optimizer, or use it",
                "op": "",
                "module": "model.score",
                "tensors": [],
                "count": 1,
                "library": None,
                "edits": [],
                "tried": "",
                "follows": [],
            },
        ],
        "memory": {"cuda:0": device_memory(), "cuda:1": device_memory(0.8)},
        "placement": {
            "model.embed_tokens": ["cuda:0"],
            **layers,
            "model.norm": ["cuda:1"],
            "lm_head": ["cuda:1"],
        },
        "sources": {"/home/me/project/train.py": {str(21 + n): line for n, line in enumerate(SOURCE)}},
        "collectives": [],
        "steps": 3,
        "seconds": 4.2,
        "notes": ["it was called as torchrun calls it"],
        "target": "train.py",
        "shapes_only": True,
        "asked": [
            {"how": "decision", "op": "Tensor.__bool__", "where": place(27), "inside": None},
            {"how": "value", "op": "Tensor.item", "where": place(28), "inside": None},
        ],
        "files": {"overlay": True, "why": "", "kept": "", "written": []},
        "beyond": [],
        "instead": [],
    }


def collectives() -> list[dict[str, Any]]:
    """Two ranks, of which the second gives far more in the end."""

    def call(op: str, elements: int, count: int, step: int) -> dict[str, Any]:
        told = {
            "op": op,
            "group": "0",
            "ranks": 2,
            "dtype": "float32",
            "elements": elements,
            "bytes": 4 * elements,
        }
        return {**told, "where": place(27), "step": step, "count": count}

    def rank(number: int, last: int) -> dict[str, Any]:
        calls = [call("allreduce", 25_000_000, 3, 0), call("allreduce", last, 1, 1)]
        given = sum(one["bytes"] * one["count"] for one in calls)
        return {"rank": number, "calls": calls, "bytes": given, "bytes_per_step": given // 2}

    return [rank(0, 1), rank(1, 402_653_184)]


def fit() -> dict[str, Any]:
    """A search on two kinds of GPU: what fits first, the fastest of it first."""

    def option(
        gpu: str, gpus: int, strategy: str, kept: str, rows: int, need: float, speed: float | None
    ) -> Any:
        capacity = {"H200": 140, "A100-40GB": 39.4}[gpu] * GIB
        peak = int(need * 0.93 * GIB)
        kinds = {"weights": 0.4, "gradients": 0.02, "optimizer": 0.08, "activations": 0.42, "temporary": 0.08}
        return {
            **{
                "gpu": gpu,
                "strategy": strategy,
                "gpus": gpus,
                "kept": kept,
                "quantize": None,
                "length": 4096,
            },
            **{"micro_batch": rows, "gradient_accumulation_steps": 32 // rows // gpus, "rows_a_step": 32},
            **{"fits": need * GIB <= 0.95 * capacity, "peak_bytes": peak, "reserved_bytes": int(need * GIB)},
            **{
                "context_bytes": GIB // 2,
                "needed_bytes": int((need + 0.5) * GIB),
                "capacity_bytes": int(capacity),
            },
            **{"kinds": {kind: int(share * peak) for kind, share in kinds.items()}},
            "tokens_a_second_estimate": speed,
        }

    options = [
        option("H200", 1, "single", "all", 4, 98.0, 15200.0),
        option("H200", 1, "single", "half", 8, 120.5, 14100.0),
        option("H200", 1, "single", "checkpointed", 16, 71.0, 11900.0),
        option("A100-40GB", 4, "sharded", "checkpointed", 4, 33.1, 10400.0),
        option("A100-40GB", 2, "split", "checkpointed", 1, 36.0, 2900.0),
        option("H200", 1, "single", "all", 8, 171.0, 15900.0),
        option("A100-40GB", 1, "single", "checkpointed", 1, 44.0, 3300.0),
    ]
    return {
        "model": "Qwen/Qwen3-8B",
        "rows_a_step": 32,
        "seconds": 21.4,
        "margin": 0.05,
        "options": options,
        "best": options[0],
        "not_executed": {"8 × A100-40GB, a copy on each": "the weights alone need 61 GiB"},
        "estimate_assumes": [
            "products at 55% of the GPU's published 16-bit rate with compiled layers, 40% without"
        ],
        "config": "model:\n  name: Qwen/Qwen3-8B\ntraining:\n  batch_size: 4\n  gradient_accumulation_steps: 8\n",
    }
