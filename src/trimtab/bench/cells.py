"""Measures one cell of the memory and speed benchmarks: a method on a model with a batch, its peak and its step times.

Each cell runs in a process of its own (a fork of `nursery.py`'s, or `python -m trimtab.bench.cells`), so that none
sees what another left behind and one that is killed for memory is one failed cell. The batch is random tokens: neither
memory nor time depends on what they say. Nothing is estimated; what could not be measured is an error.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.bench.evaluate import evaluating
from trimtab.bench.measure import PeakMeter
from trimtab.bench.methods import FirstOrder, Method, Tuning, ZerothTuner, method, placed
from trimtab.bench.results import reason_of
from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError, TrimtabError
from trimtab.models import load_model, load_model_config
from trimtab.models.adapters import add_lora
from trimtab.placement import PlacementPlan, place
from trimtab.zeroth.batches import BatchStream, Collate
from trimtab.zeroth.objective import Example, ScoreBatch, candidate_scores
from trimtab.zeroth.optimizer import ZerothOrder
from trimtab.zeroth.sweep import on_real_gpu

if TYPE_CHECKING:
    from trimtab.bench.nursery import Nursery

INFERENCE = "inference"


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How all cells of a benchmark are measured."""

    device: str = "auto"
    precision: str = "auto"
    warm_up: int = 2
    """Steps before the timed ones. The peak is theirs: two hold all that a method ever keeps."""
    steps: int = 0
    """Timed steps, each beside the bare forwards of the same batch; 0 measures memory alone."""
    iterations: int = 1
    """DiZO: iterations of a projection round. One holds as much memory as ten."""
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell(Ways):
    """One measurement: everything that decides its figures."""

    model: str
    random: bool
    """Random weights in the model's shapes: its config is read, its weights are not."""
    method: str
    batch: int
    length: int


def measure(cell: Cell) -> dict[str, Any]:
    """Load, step, read. In this process: `run_cell` gives it one of its own."""
    how = None if cell.method == INFERENCE else method(cell.method)
    with placed(
        how,
        model=cell.model,
        device=cell.device,
        precision=cell.precision,
        batch_size=cell.batch,
        max_length=cell.length + 1,
    ) as (config, plan):
        touch_libraries(adapters=how is not None and how.lora)
        meter = PeakMeter(plan)
        try:
            model = build_model(config.model, plan, random=cell.random)
            if how is not None and how.lora:
                model = add_lora(model, config.lora)
            runner = _Runner(model, how, _stream(model, cell), cell, plan)
            meter.reset()
            for _ in range(runner.warm_up):
                runner.step()
            runner.round()
            runner.synchronize()
            result = {
                **_facts(model, plan, runner),
                "peak_bytes": meter.read(),
                "base_bytes": meter.base,
                "measured": meter.how,
            }
        finally:
            meter.close()
        return result | (_timed(runner) if cell.steps else {})


def build_model(settings: ModelSettings, plan: PlacementPlan, *, random: bool) -> Any:
    """The model with its weights, or with random ones in its shapes, where the plan says."""
    if not random:
        return load_model(settings, plan)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu" if plan.device_map else plan.load_device):
        model: Any = AutoModelForCausalLM.from_config(
            load_model_config(settings), dtype=plan.torch_weight_dtype
        )
    model.config.use_cache = False
    return place(model, plan)


def random_examples(vocabulary: int, count: int, length: int, seed: int = 0) -> list[Example]:
    """Prompts of `length` random tokens with two answers of one token: one row each, one position's logits."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (count, length), generator=generator).tolist()
    return [Example(prompt, [[1], [2]], number % 2) for number, prompt in enumerate(tokens)]


def bare_passes(
    model: Any, batch: ScoreBatch, groups: Sequence[int], optimizer: ZerothOrder | None = None
) -> Callable[[], None]:
    """Forwards of the model as it is, run as the optimizer runs its own: so many copies of the batch in each.

    Where the step is captured as a CUDA graph, so are these; the losses are computed and not read.
    """
    captured = None
    if optimizer is not None and on_real_gpu(optimizer.tuned[0].parameter):
        from trimtab.zeroth.graph import captured_passes

        captured, _ = captured_passes(model, optimizer.tuned, optimizer.settings.compile)

    def run() -> None:
        with torch.inference_mode():
            for lanes in groups:
                if captured is not None:
                    captured.losses(None, range(lanes), batch)
                else:
                    candidate_scores(model, batch, lanes)

    return run


class _Runner:
    """Steps of any method, and the bare forwards that they are held against."""

    def __init__(
        self, model: Any, how: Method | None, stream: BatchStream, cell: Cell, plan: PlacementPlan
    ) -> None:
        self.model, self.stream, self.plan = model, stream, plan
        self.warm_up, self.steps = cell.warm_up, cell.steps
        self.passes, self.groups, self.idle = 1, [1], 0
        self.optimizer: ZerothOrder | None = None
        self.first: FirstOrder | None = None
        if how is None:
            model.eval()
        else:
            if how.rule == "dizo":
                # One round after the warm-up and one after as many timed steps: a round is due at equal intervals.
                self.warm_up = max(cell.warm_up, cell.steps)
                self.steps = self.warm_up if cell.steps else 0
            tuning = Tuning(
                steps=self.warm_up + self.steps,
                batch_size=cell.batch,
                learning_rate=how.learning_rate,
                eps=how.eps,
                seed=0,
                interval=self.warm_up,
            )
            if how.family == "first":
                self.first = FirstOrder(model, stream, tuning, plan)
            else:
                more = {"projection_iterations": cell.iterations, "compile": cell.compile}
                self.optimizer = ZerothTuner(model, how, stream, tuning, **more).optimizer
                self.passes, lanes = self.optimizer.settings.passes, self.optimizer.lanes
                self.groups = [min(lanes, self.passes - at) for at in range(0, self.passes, lanes)]
        self._bare: Callable[[], None] | None = None

    def step(self) -> None:
        if self.optimizer is not None:
            result = self.optimizer.step(self.stream(), more=True)  # as in a run
            # A slope of exactly 0 writes nothing: its time would not be a step's.
            self.idle += not any(result.coefficients)
        elif self.first is not None:
            self.first.step()
        else:
            bare_passes(self.model, self.stream()[0], [1])()

    def round(self) -> bool:
        return self.optimizer is not None and self.optimizer.project(self.stream) is not None

    def bare(self) -> None:
        if self._bare is None:
            self._bare = bare_passes(self.model, self.stream()[0], self.groups, self.optimizer)
        # First-order steps run under autocast; zeroth-order ones compute in the weights' own format.
        with evaluating(self.model, self.plan if self.first is not None else None):
            self._bare()

    def synchronize(self) -> None:
        if self.plan.kind == "cuda":
            for device in self.plan.devices:
                torch.cuda.synchronize(device)
        elif self.plan.kind == "mps":
            torch.mps.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start


def _timed(runner: _Runner) -> dict[str, Any]:
    """Steps and bare forwards by turns, so that what else the machine does meets both."""
    runner.seconds(runner.bare)  # captures, where there is something to capture
    runner.idle = 0
    step_seconds, bare_seconds = [], []
    for _ in range(runner.steps):
        step_seconds.append(runner.seconds(runner.step))
        bare_seconds.append(runner.seconds(runner.bare))
    rounds: list[bool] = []
    spent = runner.seconds(lambda: rounds.append(runner.round()))
    optimizer = runner.optimizer
    return {
        "step_seconds": step_seconds,
        "bare_seconds": bare_seconds,
        "idle_steps": runner.idle,
        "round_seconds": spent if rounds == [True] else None,
        "round_passes": 2 * optimizer.settings.projection_iterations if optimizer and rounds == [True] else 0,
    }


def _facts(model: Any, plan: PlacementPlan, runner: _Runner) -> dict[str, Any]:
    parameters = list(model.parameters())
    tuned = [p for p in parameters if p.requires_grad]
    optimizer = runner.optimizer
    return {
        "passes": runner.passes,
        "backwards": int(runner.first is not None),
        "copies_in_a_forward": runner.groups[0],
        "device": plan.device,
        "precision": plan.precision,
        "weights": plan.weight_precision,
        "parameters": sum(p.numel() for p in parameters),
        "weights_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "tuned_parameters": sum(p.numel() for p in tuned) if runner.optimizer or runner.first else 0,
        "anchor_bytes": sum(a.numel() * a.element_size() for a in optimizer.anchors.values())
        if optimizer
        else 0,
        "engine": optimizer.describe() if optimizer else [],
    }


def _stream(model: Any, cell: Cell) -> BatchStream:
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and cell.length > longest:
        raise RequestError.of(
            f"length {cell.length}",
            f"{cell.model} has {longest} positions",
            f"give at most {longest}",
        )
    examples = random_examples(text.vocab_size, 4 * cell.batch, cell.length)
    return BatchStream(examples, cell.batch, 1, 0, Collate(0, cell.length + 1))


def touch_libraries(*, adapters: bool = False) -> None:
    """Code and workspaces that any first step brings in are not the model's memory."""
    if adapters:
        import peft  # noqa: F401
    layer = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.randn(64, 256)).logsumexp(-1).sum().backward()
    optimizer.step()


def run_cell(cell: Cell, born_in: Nursery | None = None) -> dict[str, Any]:
    """`measure` in a process of its own; what went wrong there is a TrimtabError here."""
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        asked, answer, said = (Path(folder) / name for name in ("cell.json", "result.json", "said.txt"))
        asked.write_text(json.dumps(asdict(cell)), encoding="utf-8")
        code = _started(asked, answer, said) if born_in is None else born_in.bear(asked, answer, said)
        if code == 0:
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        if answer.is_file():
            raise TrimtabError(json.loads(answer.read_text(encoding="utf-8"))["failed"])
        words = said.read_text(encoding="utf-8", errors="replace").split() if said.is_file() else []
    if code == -signal.SIGKILL:
        raise TrimtabError("the process was killed, most likely by the system for want of memory")
    last = " ".join(words[-60:]) or "it said nothing"
    raise TrimtabError(f"the process ended{'' if code is None else f' with {code}'}: {last}")


def _started(asked: Path, answer: Path, said: Path) -> int:
    with said.open("wb") as words:
        return subprocess.run(
            [sys.executable, "-m", "trimtab.bench.cells", str(asked), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
        ).returncode


def main(asked: str, answer: str) -> int:
    """The child: reads a cell, writes its result, or why there is none."""
    cell = Cell(**json.loads(Path(asked).read_text(encoding="utf-8")))
    try:
        result = measure(cell)
    except Exception as error:
        traceback.print_exc()
        Path(answer).write_text(json.dumps({"failed": reason_of(error)}), encoding="utf-8")
        return 1
    Path(answer).write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
