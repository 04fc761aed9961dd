"""`trimtab train`: the main job."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.recipes.planning import Planned

SAVING_SECONDS = 600


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file, then overrides such as device=cpu."
        ),
    ] = None,
) -> None:
    """Fine-tune a model. Without CONFIG: the built-in quick start on the built-in model."""
    from trimtab.cli.arguments import config_from
    from trimtab.errors import RequestError
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run_folder import RunFolder, default_folder, failure_kept, open_run_folder

    request = config_from(arguments or [])
    config = request.config
    planned = plan_run(config)
    launcher = planned.hardware.launcher
    main = launcher.rank == 0
    if config.output_dir is None:
        if launcher.multi_process:
            raise RequestError.of(
                f"output_dir is not set under {launcher.name}",
                "every process must write to the same folder, and each would make up its own",
                "set output_dir",
            )
        config.output_dir = default_folder(config)
    if planned.plan.starts_launcher:
        raise typer.Exit(_launch(arguments or [], config, planned))

    if main:
        _announce(request, planned)
        run = open_run_folder(config)
    else:
        run = RunFolder(Path(config.output_dir).expanduser())

    def say(text: str) -> None:
        if main:
            print(text, flush=True)

    with failure_kept(run, config, planned.plan, launcher.rank):
        quiet_libraries()
        from trimtab.recipes.run import run_recipe

        summary = run_recipe(config, planned.plan, run, say)
    if main:
        _conclude(config, summary)
    if summary["status"] != "finished":
        raise typer.Exit(1)


def _announce(request: Request, planned: Planned) -> None:
    from trimtab.cli.plan import parts_table, plan_lines
    from trimtab.config import config_warnings

    config = request.config
    print(f"trimtab train: {request.origin}, into {config.output_dir}")
    for line in plan_lines(request, planned):
        print("  " + line)
    if planned.plan.strategy == "split":
        print("\n".join("  " + line for line in parts_table(planned)))
    for warning in config_warnings(config):
        print(f"  ! {warning}")


def _conclude(config: Config, summary: dict[str, Any]) -> None:
    if summary["status"] == "interrupted":
        print(
            f"\nstopped at step {summary['steps']} of {summary['planned_steps']}; a checkpoint is saved. Go on with\n"
            f"  trimtab train {shlex.quote(f'{config.output_dir}/config.yaml')} training.resume=true"
        )
        return
    for sample in summary["samples"]:
        print(f"\nasked   {sample['prompt']}\nbefore  {sample['before']}\nafter   {sample['after']}")
    loss = summary["eval_loss"]
    if loss["after"] is not None and loss["before"] is not None:
        change = (
            f" ({100 * (loss['after'] - loss['before']) / loss['before']:+.0f} %)" if loss["before"] else ""
        )
        print(f"\nheld-out loss {loss['before']:.3f} before, {loss['after']:.3f} after{change}")
    for name, value in summary.get("metrics", {}).items():
        print(f"{name} {value['before']:.3f} before, {value['after']:.3f} after")
    kept = "adapter" if config.method == "lora" else "model"
    steps = f"{summary['steps']} step{'s' * (summary['steps'] != 1)}"
    print(
        f"{steps} in {summary['train_seconds']:.0f} s on {summary['device']}; kept in "
        f"{config.output_dir}: {kept}/, config.yaml, plan.json, metrics.jsonl, summary.json\n"
        f"next: trimtab export {shlex.quote(str(config.output_dir))} --to ollama"
    )


def _launch(arguments: list[str], config: Config, planned: Planned) -> int:
    """Start torchrun over this same command, one process per device."""
    count = planned.plan.processes
    env = dict(os.environ)
    for name in planned.hardware.launcher.stale:
        env.pop(name, None)
    # torchrun would give each process one thread; on the CPU that wastes the others.
    env.setdefault("OMP_NUM_THREADS", str(max(1, planned.hardware.cpu.cores // count)))
    # How long torchrun waits for processes that save a checkpoint before it kills them; 30 seconds by itself.
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "trimtab", "train", *arguments]
    if not any(a.startswith("output_dir=") for a in arguments):
        command.append(f"output_dir={config.output_dir}")
    # Decided here once: the processes would each judge by the memory that is free when they look.
    command.append(f"sharding={str(planned.plan.strategy == 'sharded').lower()}")
    print(f"starting {count} processes with torchrun: {planned.plan.reasons['strategy']}", flush=True)
    return 1 if _wait_for(command, env) else 0


def _wait_for(command: list[str], env: dict[str, str]) -> int:
    """Run torchrun to its end and pass on what this process is told meanwhile; answers with its exit status.

    Its processes save a checkpoint when they are told to end, and would train on if only this one ended.
    """
    import psutil

    # In a group of its own: a terminal tells the whole of ours, and what is told twice ends without a checkpoint.
    launcher = psutil.Popen(command, env=env, process_group=0)
    told = 0

    def pass_on(number: int, frame: object) -> None:
        nonlocal told
        told += 1
        with contextlib.suppress(psutil.NoSuchProcess):
            if told == 1:
                launcher.send_signal(number)
                return
            # torchrun waits for them by now, and would leave them behind if it were told again.
            for process in launcher.children():
                process.send_signal(number) if told == 2 else process.kill()

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored (nohup, a background job) stays ignored.
    heard = [n for n in map(signal.Signals.__getitem__, names) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        return int(launcher.wait())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def quiet_libraries() -> None:
    """One progress display is enough: ours."""
    # Read by the datasets library when it is imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
