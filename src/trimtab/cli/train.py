"""`trimtab train`: the main job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trimtab.cli.arguments import Arguments, request_from

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.recipes.planning import Planned


def train(arguments: Arguments = None) -> None:
    """Fine-tune a model. Without CONFIG: the built-in quick start on the built-in model."""
    from trimtab.errors import RequestError
    from trimtab.export import export_as_asked
    from trimtab.recipes.launch import launch, quiet_libraries
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run_folder import RunFolder, default_folder, failure_kept, open_run_folder

    request = request_from(arguments or [])
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
        raise typer.Exit(launch(arguments or [], config, planned))

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
    if main and config.export.to is not None:
        print("\n".join(export_as_asked(config, say).lines()))


def _announce(request: Request, planned: Planned) -> None:
    from trimtab.config import config_warnings
    from trimtab.recipes.disk_needs import planned_room
    from trimtab.recipes.plan_text import parts_table, plan_lines

    config = request.config
    room = planned_room(config, planned)
    print(f"trimtab train: {request.origin}, into {config.output_dir}")
    for line in plan_lines(request, planned, room):
        print("  " + line)
    if planned.plan.strategy == "split":
        print("\n".join("  " + line for line in parts_table(planned)))
    for warning in config_warnings(config):
        print(f"  ! {warning}")
    room.check(config)


def _conclude(config: Config, summary: dict[str, Any]) -> None:
    from trimtab.models.families import CAUSAL_LM
    from trimtab.recipes.table import recipe_of

    if summary["status"] == "interrupted":
        print(
            f"\nstopped at step {summary['steps']} of {summary['planned_steps']}; a checkpoint is saved. Go on with\n"
            f"  trimtab train {shlex.quote(f'{config.output_dir}/config.yaml')} training.resume=true"
        )
        return
    for sample in summary["samples"]:
        right = f"\nright   {sample['expected']}" if "expected" in sample else ""
        print(f"\nasked   {sample['prompt']}{right}\nbefore  {sample['before']}\nafter   {sample['after']}")
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
        f"{config.output_dir}: {kept}/, config.yaml, plan.json, metrics.jsonl, summary.json"
    )
    if config.export.to is None:
        run = shlex.quote(str(config.output_dir))
        spoken = recipe_of(config).family is CAUSAL_LM
        print(f"next: trimtab export {run} --to ollama" if spoken else f"next: trimtab report {run}")
