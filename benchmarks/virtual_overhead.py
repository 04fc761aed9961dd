"""What virtual GPUs cost: time per operation, and a LoRA step of the built-in model, against the plain CPU.

    python benchmarks/virtual_overhead.py [--steps 3] [--rounds 3] [--repeats 9] [--no-model]

Prints a table. Operations are timed on one thread by processor time (the best of several repeats), so that other
work on the machine does not count; the step by the clock (the median of each round, and of the rounds). The bounds are
those of the design: 40 µs per operation, a step at most twice as long.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import trimtab.virtual as virtual
from trimtab.virtual.observer import Observer


def per_call(work: Callable[[], object], repeats: int, calls: int = 300) -> float:
    """Microseconds of processor time per call."""
    for _ in range(calls):
        work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            work()
        times.append((time.thread_time() - start) / calls * 1e6)
    return min(times)


def operations(device: str, size: int = 16) -> dict[str, Callable[[], object]]:
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    c = torch.zeros(size, size, device=device)
    return {
        "add": lambda: a + b,
        "mm": lambda: a @ b,
        "view": lambda: a.view(size * size),
        "add_": lambda: c.add_(b),
        "softmax": lambda: torch.nn.functional.softmax(a, dim=-1),
        "cat": lambda: torch.cat([a, b]),
    }


def operation_table(repeats: int) -> None:
    def times(device: str, size: int = 16) -> dict[str, float]:
        return {name: per_call(work, repeats) for name, work in operations(device, size).items()}

    plain = times("cpu")
    with virtual.virtual_gpus(1):
        there, beside = times("cuda:0"), times("cpu")
    with virtual.virtual_gpus(1, observer=Observer()):
        watched = times("cuda:0")
    with virtual.virtual_gpus(1, shapes=True):
        shapes = times("cuda:0", 512)  # smaller ones would have values
    after = times("cpu")
    print(
        f"{'µs per op':<10}{'plain':>9}{'virtual':>9}{'overhead':>10}{'observed':>10}"
        f"{'cpu beside':>12}{'off again':>11}{'shapes only':>13}"
    )
    for name, base in plain.items():
        row = (
            base,
            there[name],
            there[name] - base,
            watched[name] - base,
            beside[name] - base,
            after[name] - base,
            shapes[name],
        )
        widths = (9, 9, 10, 10, 12, 11, 13)
        print(f"{name:<10}" + "".join(f"{value:>{w}.1f}" for value, w in zip(row, widths, strict=True)))
    mix = statistics.mean(there[n] - plain[n] for n in ("add", "mm", "view"))
    print(f"overhead of the mix (add, mm, view): {mix:.1f} µs per op; bound 40")


def model_step(device: str, steps: int) -> tuple[float, float, list[float]]:
    """A LoRA step of the built-in model at 1 × 256: median seconds, least processor seconds, losses."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from trimtab.config.schema import ModelSettings
    from trimtab.models.load import model_source

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_source(ModelSettings()), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, 1000, (1, 256), generator=torch.Generator().manual_seed(1)).to(device)
    clock, processor, losses = [], [], []
    for _ in range(steps + 1):
        start, start_processor = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    return statistics.median(clock[1:]), min(processor[1:]), losses


def model_table(steps: int, rounds: int) -> None:
    """Plain, virtual and observed by turns: what else the machine does from minute to minute meets all of them."""
    kinds: dict[str, Observer | None] = {"virtual": None, "virtual, observed": Observer()}
    ratios: dict[str, list[tuple[float, float]]] = {title: [] for title in kinds}
    for number in range(1, rounds + 1):
        plain, plain_processor, plain_losses = model_step("cpu", steps)
        print(
            f"round {number}: LoRA step, built-in model, 1 × 256: plain {plain:.3f} s "
            f"(processor {plain_processor:.3f} s)",
            flush=True,
        )
        for title, observer in kinds.items():
            with virtual.virtual_gpus(1, observer=observer):
                there, processor, losses = model_step("cuda:0", steps)
            ratios[title].append((there / plain, processor / plain_processor))
            print(
                f"  {title}: {there:.3f} s, ratio {there / plain:.2f} (processor {processor:.3f} s, ratio "
                f"{processor / plain_processor:.2f}); losses equal bit for bit: {losses == plain_losses}",
                flush=True,
            )
    for title, found in ratios.items():
        clock, processor_ratio = (statistics.median(r[k] for r in found) for k in (0, 1))
        spread = f"{min(r[0] for r in found):.2f} to {max(r[0] for r in found):.2f}"
        print(f"{title}: median ratio {clock:.2f} ({spread}; processor {processor_ratio:.2f}); bound 2.00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the model's step; the median ratio is given"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="of 300 calls of an operation; the best one is given"
    )
    parser.add_argument("--no-model", action="store_true")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    operation_table(arguments.repeats)
    torch.set_num_threads(threads)
    if not arguments.no_model:
        model_table(arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
