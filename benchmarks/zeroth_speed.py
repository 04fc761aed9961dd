"""A zeroth-order step beside the reference MeZO loop, two bare forwards and inference: time and peak memory.

    python benchmarks/zeroth_speed.py --compile --profile --out benchmarks/results/zeroth-speed-h200.json  # and a .md
    python benchmarks/zeroth_speed.py --size tiny --device cpu

Random weights in Qwen3's shapes, every weight perturbed, 16 rows × 64 tokens, one answer token a row. All parts of a
size run in one process on the same weights and the same rows. Times are medians after a warm-up, by the clock with the
device synchronised around each step; peaks are the allocator's on CUDA, resident memory on the CPU. Steps follow each
other as in a run: on a GPU each writes the update of the one before it. With --profile, also the GPU's time by kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from zeroth_report import gpu_profile, page

from trimtab.bench.cells import bare_passes, touch_libraries
from trimtab.bench.measure import PeakMeter
from trimtab.placement import PlacementPlan
from trimtab.zeroth import Example, ScoreBatch, ZerothOrder, ZerothSettings, build_batch

VOCABULARY = 151936
# hidden, layers, heads, key-value heads, head width, feed-forward, vocabulary
SIZES = {
    "tiny": (64, 2, 4, 2, 16, 128, 512),
    "0.6B": (1024, 28, 16, 8, 128, 3072, VOCABULARY),
    "1.7B": (2048, 28, 16, 8, 128, 6144, VOCABULARY),
    "4B": (2560, 36, 32, 8, 128, 9728, VOCABULARY),
}
BOUNDS = {"0.6B": 8.0, "1.7B": 4.0, "4B": 3.0}
"""The least speed-up over the reference loop that this project holds itself to."""
LEARNING_RATE, EPS = 1e-6, 1e-3


def make_model(size: str, device: str, dtype: torch.dtype) -> nn.Module:
    hidden, layers, heads, key_value_heads, head_dim, ffn, vocabulary = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: nn.Module = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).eval()


def make_rows(size: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """[rows, length] tokens, and the answer that follows each row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SIZES[size][-1], (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, -1].contiguous()


def make_batch(tokens: Tensor, answers: Tensor) -> ScoreBatch:
    examples = [Example(row.tolist(), [[int(a)]], 0) for row, a in zip(tokens, answers, strict=True)]
    return build_batch(examples, pad_id=0, max_length=tokens.shape[1] + 1)


class ReferenceMeZO:
    """MeZO as it is usually written: noise by a re-seeded generator, tensor by tensor, in four sweeps over the weights.

    Forwards are eager and compute the logits of every position; the loss takes those of the answer.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, answers: Tensor, device: str) -> None:
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.tokens = tokens.to(device)
        self.mask = torch.ones_like(self.tokens)
        self.labels = torch.full_like(self.tokens, -100)
        self.labels[:, -1] = answers.to(device)
        self.generator = torch.Generator().manual_seed(0)

    def perturb(self, seed: int, factor: float) -> None:
        torch.manual_seed(seed)
        for parameter in self.parameters:
            z = torch.normal(
                mean=0.0, std=1.0, size=parameter.size(), device=parameter.device, dtype=parameter.dtype
            )
            parameter.data.add_(z, alpha=factor * EPS)

    def loss(self) -> float:
        with torch.inference_mode():
            logits = self.model(input_ids=self.tokens, attention_mask=self.mask).logits
            log_probabilities = F.log_softmax(logits, dim=-1)
            answered = self.labels != -100
            chosen = log_probabilities.gather(-1, self.labels.clamp(min=0)[..., None])[..., 0]
            score = (chosen * answered).sum(-1) / answered.sum(-1)
            return float(-score.mean())

    def step(self) -> float:
        seed = int(torch.randint(0, 10**9, (1,), generator=self.generator))
        self.perturb(seed, 1)
        plus = self.loss()
        self.perturb(seed, -2)
        minus = self.loss()
        self.perturb(seed, 1)
        slope = (plus - minus) / (2 * EPS)
        torch.manual_seed(seed)
        for parameter in self.parameters:
            z = torch.normal(
                mean=0.0, std=1.0, size=parameter.size(), device=parameter.device, dtype=parameter.dtype
            )
            parameter.data.add_(z, alpha=-LEARNING_RATE * slope)
        return (plus + minus) / 2


def bare_pair(
    model: nn.Module, batch: ScoreBatch, optimizer: ZerothOrder, *, stacked: bool
) -> Callable[[], None]:
    """Two forwards with the weights as they are, run as our step runs its own: captured where that is captured.

    `stacked`: both copies of the rows in one forward, as in our step; otherwise one after the other.
    """
    return bare_passes(model, batch, [2] if stacked else [1, 1], optimizer)


class Timer:
    """Runs a piece of work until its time is up, at least five times, and keeps the clock and the peak."""

    def __init__(self, device: str, meter: PeakMeter, seconds: float, most: int) -> None:
        self.device, self.meter, self.seconds, self.most = device, meter, seconds, most

    def __call__(self, work: Callable[[], object], warm_up: int = 3) -> dict[str, Any]:
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        self.meter.reset()
        started = time.perf_counter()
        for _ in range(warm_up):
            work()
        self.synchronize()
        first = time.perf_counter() - started
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - begun < self.seconds and len(times) < self.most):
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return {
            "ms": 1000 * statistics.median(times),
            "ms_fastest": 1000 * min(times),
            "ms_slowest": 1000 * max(times),
            "runs": len(times),
            "warm_up_seconds": first,
            "peak_bytes": self.meter.read(),
        }

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    plan = PlacementPlan(
        device=options.device,
        precision=options.precision,
        scaler=False,
        weight_precision=options.precision,
        strategy="single",
    )
    touch_libraries()
    meter = PeakMeter(plan)
    timer = Timer(options.device, meter, options.seconds, options.runs)
    model = make_model(size, options.device, dtype)
    tokens, answers = make_rows(size, options.rows, options.length)
    batch = make_batch(tokens, answers)
    parts: dict[str, dict[str, Any]] = {}

    inference = bare_passes(model, batch, [1])
    parts["inference"] = timer(inference)

    reference = ReferenceMeZO(model, tokens, answers, options.device)
    reference_loss = reference.loss()
    parts["reference MeZO"] = timer(reference.step)
    del reference

    settings = ZerothSettings(
        method="mezo", learning_rate=LEARNING_RATE, eps=EPS, lanes=options.lanes, compile=options.compile
    )
    optimizer = ZerothOrder(model, settings)
    losses: list[float] = []
    idle = 0

    def step() -> None:
        nonlocal idle
        result = optimizer.step([batch], more=True)
        losses.append(result.loss)
        idle += not any(result.coefficients)

    optimizer.step([batch])  # what compiling takes is not a step's, in time or in memory
    if (captured := optimizer._captured) is not None:
        captured.forget()
    parts["our step"] = timer(step)
    described = optimizer.describe()
    profiled: dict[str, Any] = {"our step": gpu_profile(step)} if options.profile else {}
    for name, stacked in (("two forwards, stacked", True), ("two forwards, in turn", False)):
        pair = bare_pair(model, batch, optimizer, stacked=stacked)
        pair()
        parts[name] = timer(pair)
        if options.profile:
            profiled[name] = gpu_profile(pair)
    meter.close()

    base = parts["inference"]["peak_bytes"]
    for part in parts.values():
        part["of_inference"] = part["peak_bytes"] / base if base > 0 else None
    ours = parts["our step"]["ms"]
    return {
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parts": parts,
        "speed_up": parts["reference MeZO"]["ms"] / ours,
        "speed_up_wanted": BOUNDS.get(size),
        "of_two_forwards_stacked": ours / parts["two forwards, stacked"]["ms"],
        "of_two_forwards_in_turn": ours / parts["two forwards, in turn"]["ms"],
        "peak_of_inference": parts["our step"]["of_inference"],
        "reference_loss": reference_loss,
        "our_first_loss": losses[0],
        "idle_steps": idle,
        "engine": described,
        **({"profile": profiled} if profiled else {}),
    }


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['size']}: {found['parameters']:,} parameters; {'; '.join(found['engine'])}")
    print(f"{'':<24}{'ms':>10}{'fastest':>10}{'slowest':>10}{'runs':>6}{'peak MiB':>11}{'of inference':>14}")
    for name, part in found["parts"].items():
        share = f"{part['of_inference']:.3f}" if part["of_inference"] is not None else "–"
        print(
            f"{name:<24}{part['ms']:>10.2f}{part['ms_fastest']:>10.2f}{part['ms_slowest']:>10.2f}"
            f"{part['runs']:>6}{part['peak_bytes'] / 2**20:>11,.0f}{share:>14}"
        )
    wanted = f" (wanted: {found['speed_up_wanted']:g})" if found["speed_up_wanted"] else ""
    print(f"speed-up over the reference: {found['speed_up']:.1f}×{wanted}")
    print(
        f"step by two bare forwards: {found['of_two_forwards_stacked']:.2f} stacked, "
        f"{found['of_two_forwards_in_turn']:.2f} in turn (wanted: at most 1.2 stacked)"
    )
    print(f"loss at the start: reference {found['reference_loss']:.4f}, ours {found['our_first_loss']:.4f}")
    if found["idle_steps"]:
        print(f"{found['idle_steps']} of our steps found a slope of exactly 0 and wrote nothing")


def _stream() -> Any:
    """One for all parts, so that they share a workspace; of the priority that a captured pass has."""
    from trimtab.zeroth.graph import MAIN_PRIORITY

    return torch.cuda.Stream(priority=MAIN_PRIORITY)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="0.6B,1.7B,4B", help=f"of {', '.join(SIZES)}; commas between")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=None, help="bf16, on the CPU fp32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each of the five parts of a size")
    parser.add_argument("--runs", type=int, default=200, help="for each part, at most")
    parser.add_argument("--lanes", type=int, default=None, help="perturbed copies in one forward")
    parser.add_argument("--compile", action="store_true", help="compile the layers before they are captured")
    parser.add_argument("--profile", action="store_true", help="also the GPU's time by groups of kernels")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the results; a page of them is written beside it"
    )
    options = parser.parse_args()
    options.precision = options.precision or ("fp32" if options.device == "cpu" else "bf16")
    unknown = [size for size in options.size.split(",") if size not in SIZES]
    if unknown:
        parser.error(f"--size {', '.join(unknown)}: the sizes are {', '.join(SIZES)}")
    return options


def main() -> int:
    options = arguments()
    on_gpu = options.device.startswith("cuda")
    whole: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": torch.cuda.get_device_name(options.device) if on_gpu else platform.processor() or "CPU",
        "command": " ".join(["python", "benchmarks/zeroth_speed.py", *sys.argv[1:]]),
        "torch": str(torch.__version__),
        "precision": options.precision,
        "rows": options.rows,
        "length": options.length,
        "sizes": [],
        "failed": {},
    }
    print(f"{whole['date']}, {whole['machine']}, torch {whole['torch']}, {options.precision}", flush=True)
    for size in options.size.split(","):
        try:
            with torch.cuda.stream(_stream()) if on_gpu else nullcontext():
                found = measure(size, options)
        except Exception as error:
            # One size that fails, for want of memory say, does not cost the figures of the others.
            whole["failed"][size] = f"{type(error).__name__}: {error}"
            print(f"\n{size}: FAILED: {whole['failed'][size]}", flush=True)
        else:
            whole["sizes"].append(found)
            show(found)
        if options.out:
            options.out.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
            options.out.with_suffix(".md").write_text(page(whole), encoding="utf-8")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return 1 if whole["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
