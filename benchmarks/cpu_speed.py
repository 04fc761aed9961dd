"""The built-in model's LoRA step on the CPU: Trimtab's trainer against transformers' with PEFT, step by step in turns.

Same rows in the same order, same batch, same adapter, same optimizer and schedule; the plain side pads its batches and
is otherwise as `Trainer` is by default. Tokens are those of the rows, padding counts on neither side. Each step is
timed from one beginning to the next, with all that its trainer does in between. On one thread (OMP_NUM_THREADS=1) the
processor's seconds of each side are told besides, which other work on the machine hardly changes.
Run: python benchmarks/cpu_speed.py [--steps 50] [key=value ...]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from trimtab.cli.arguments import request_from
from trimtab.config import Config
from trimtab.fast.apply import make_fast
from trimtab.models.tuned import load_tuned
from trimtab.recipes.planning import Planned, plan_run
from trimtab.recipes.recipe import Job
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.table import recipe_of

SIDES = ("transformers + PEFT", "Trimtab")


class Turns:
    """Whose step is next; the other side waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next, self._gone = 0, set[int]()

    def take(self, side: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next == side or 1 - side in self._gone)

    def give(self, side: int, *, for_good: bool = False) -> None:
        with self._changed:
            self._next = 1 - side
            if for_good:
                self._gone.add(side)
            self._changed.notify_all()


class Timed(TrainerCallback):
    """Seconds and page faults of each step of one side."""

    def __init__(self, turns: Turns, side: int) -> None:
        self._turns, self._side = turns, side
        self._began: tuple[float, float, int] | None = None
        self.seconds: list[float] = []
        self.computed: list[float] = []
        """The processor's seconds of this side's thread."""
        self.faults: list[int] = []

    def _end(self) -> None:
        if self._began is not None:
            self.seconds.append(time.perf_counter() - self._began[0])
            self.computed.append(time.thread_time() - self._began[1])
            self.faults.append(_faults() - self._began[2])

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._end()
        if self._began is not None:
            self._turns.give(self._side)
        self._turns.take(self._side)
        self._began = time.perf_counter(), time.thread_time(), _faults()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Counted:
    """A collator that notes how many tokens the rows of each batch have."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self.tokens: list[int] = []

    def __call__(self, rows: Any) -> Any:
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self._collate(rows)


def plain_trainer(config: Config, planned: Planned, prepared: Any, folder: Path) -> Trainer:
    """transformers' own, with PEFT's own adapters and batches padded to their longest row."""
    training = config.training
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=training.max_steps or -1,
        per_device_train_batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler,
        warmup_steps=training.warmup_ratio,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model=load_tuned(config, planned.plan),
        args=arguments,
        train_dataset=prepared.train,
        data_collator=DataCollatorForSeq2Seq(prepared.processor, padding=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args()
    steps = [f"training.max_steps={asked.steps}", "data.eval_fraction=0", "monitor.progress=none"]
    config = request_from([*steps, *asked.settings]).config
    planned = plan_run(config)
    recipe, turns = recipe_of(config), Turns()
    with tempfile.TemporaryDirectory() as place:
        run = RunFolder(Path(place) / "run")
        run.path.mkdir()
        prepared = recipe.prepare(config, planned.plan, lambda text: None)
        drawn = torch.Generator().manual_seed(config.seed)
        order = list(torch.utils.data.RandomSampler(prepared.train, generator=drawn))
        plain = plain_trainer(config, planned, prepared, Path(place) / "plain")
        job = Job(config, planned.plan, run, print, None, prepared)
        job.model = load_tuned(config, planned.plan)
        job.fast = make_fast(job.model, planned.plan, print, rows=prepared.train)
        with recipe.build(job) as driver:
            ours: Any = driver.trainer  # type: ignore[attr-defined]
            timed = [Timed(turns, side) for side in range(2)]
            counted = []
            for trainer, timer in zip((plain, ours), timed, strict=True):
                trainer.add_callback(timer)
                trainer._get_train_sampler = lambda *rows: order
                trainer.data_collator = Counted(trainer.data_collator)
                counted.append(trainer.data_collator)

            def other() -> None:
                torch.set_num_threads(torch.get_num_threads())  # of a thread, where OpenMP is concerned
                plain.train()
                turns.give(0, for_good=True)

            beside = threading.Thread(target=other)
            beside.start()
            driver.train()
            turns.give(1, for_good=True)
            beside.join()
        _tell((plain, ours), timed, counted, config)


def _tell(trainers: tuple[Any, Any], timed: list[Timed], counted: list[Counted], config: Config) -> None:
    steps = len(timed[0].seconds)
    tokens = counted[0].tokens[:steps]
    assert tokens == counted[1].tokens[:steps], f"other rows: {tokens} and {counted[1].tokens}"
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in trainers]
    rates = []
    print(
        f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {steps} steps of each, the first left out"
    )
    print(
        f"{config.data.source}: {statistics.mean(tokens):.0f} tokens a step of {config.training.batch_size} rows; "
        f"LoRA r {config.lora.r} on {config.lora.targets}"
    )
    for side, timer, loss in zip(SIDES, timed, losses, strict=True):
        rates.append([n / s for n, s in zip(tokens[1:], timer.seconds[1:], strict=True)])
        print(
            f"{side:20} {sum(tokens[1:]) / sum(timer.seconds[1:]):6.0f} tokens/s  "
            f"median step {statistics.median(timer.seconds[1:]):.3f} s  first {timer.seconds[0]:.3f} s  "
            f"page faults a step {statistics.median(timer.faults[1:]):,.0f}  loss {loss[0]:.4f} → {loss[-1]:.4f}"
        )
    pairs = [b / a for a, b in zip(*rates, strict=True)]
    whole = sum(timed[0].seconds[1:]) / sum(timed[1].seconds[1:])
    spread = f"by pairs of steps {min(pairs):.2f} to {max(pairs):.2f}, median {statistics.median(pairs):.2f}"
    print(f"as fast: {whole:.2f}× over all; {spread}")
    if torch.get_num_threads() == 1:
        plain, ours = (timer.computed[1:] for timer in timed)
        each = [a / b for a, b in zip(plain, ours, strict=True)]
        print(
            f"by the processor's seconds, {statistics.mean(plain):.2f} and {statistics.mean(ours):.2f} a step: "
            f"{sum(plain) / sum(ours):.2f}×; by pairs of steps {min(each):.2f} to {max(each):.2f}, "
            f"median {statistics.median(each):.2f}"
        )
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    print(f"losses of all {len(losses[0])} steps agree within {apart:.2%}")


if __name__ == "__main__":
    main()
