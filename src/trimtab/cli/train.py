"""`trimtab train`: the main job."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trimtab.cli.arguments import Arguments, request_from
from trimtab.cli.meanwhile import meanwhile
from trimtab.errors import TrimtabError
from trimtab.start_up import settle

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.recipes.planning import Planned


def train(arguments: Arguments = None) -> None:
    """Fine-tune a model. Without CONFIG: the built-in quick start on the built-in model."""
    from trimtab.monitor.last_words import tell_launcher, told_by_the_launcher
    from trimtab.rehearse.process import rehearsal_ends_by

    try:
        _train(arguments or [])
    except KeyboardInterrupt as stopped:
        if not getattr(stopped, "told", False):
            raise
        raise typer.Exit(1) from None
    except TrimtabError as error:
        # One of several processes that `train` started: its launcher ends with this message, once for all of them.
        if not told_by_the_launcher():
            raise
        tell_launcher(error)
        rehearsal_ends_by(error)
        raise typer.Exit(error.exit_code) from None


def _train(arguments: list[str]) -> None:
    from trimtab.errors import RequestError
    from trimtab.export import export_as_asked
    from trimtab.hardware import detect_launcher
    from trimtab.monitor.last_words import tell_launcher
    from trimtab.placement.sizing import DoesNotFit
    from trimtab.recipes.elastic import begun_by_this_launch, keep_the_step
    from trimtab.recipes.launch import become_first, is_first_of_all, launch, quiet_libraries
    from trimtab.recipes.own_rows import plan_by_own_rows
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.run_folder import (
        RunFolder,
        check_room,
        failure_kept,
        make_default_folder,
        open_run_folder,
    )
    from trimtab.recipes.run_lock import only_run_in, refuse_if_running
    from trimtab.recipes.trials import Trials
    from trimtab.recipes.vigil import watched

    request = request_from(arguments)
    config = request.config
    _stay_beside(request)
    if config.output_dir is not None and config.output_dir.startswith("-"):
        config.output_dir = (
            f"./{config.output_dir}"  # in the commands that are told it must not look like an option
        )
    again = begun_by_this_launch(config)
    changed = keep_the_step(config, detect_launcher()) if again else None
    others = detect_launcher().rank > 0
    with meanwhile("looking at the model", quiet=others) as tell, Trials(tell=tell) as trials:
        try:
            planned = plan_run(config, trials=trials, near_only=True)
        except DoesNotFit as worst:
            tell("reading the data, whose rows may be shorter than data.max_length")
            planned = plan_by_own_rows(config, trials, worst)
    _leave_room_here(config, planned)
    launcher = planned.hardware.launcher
    main = launcher.rank == 0
    if config.output_dir is None:
        if launcher.multi_process:
            raise RequestError.of(
                f"output_dir is not set under {launcher.name}",
                "every process must write to the same folder, and each would make up its own",
                "set output_dir",
            )
        config.output_dir = make_default_folder(config)
    if planned.plan.starts_launcher:
        refuse_if_running(Path(config.output_dir).expanduser())
        _check_resume(config, planned)
        if not is_first_of_all():
            raise typer.Exit(launch(arguments, config, planned))
        become_first(config, planned)
        planned = plan_run(config, before=planned)
        launcher = planned.hardware.launcher

    if main:
        _announce(request, planned)
        if again:
            print("begun again by the launcher" + (f"; {changed}" if changed else ""), flush=True)
        run = open_run_folder(config, again=again)
    else:
        run = RunFolder(Path(config.output_dir).expanduser(), again=again)

    with only_run_in(run.path) if main else nullcontext():
        if main:
            check_room(run, config)  # again: another run may have begun there since
        with (
            failure_kept(run, config, planned.plan, launcher.rank),
            watched(config, planned.plan, run, launcher) as watchdog,
        ):

            def say(text: str) -> None:
                watchdog.beat("start-up" if watchdog.step is None else "the end of the run")
                if main:
                    print(text, flush=True)

            quiet_libraries()
            from trimtab.recipes.run import run_recipe

            settle()
            summary = run_recipe(config, planned.plan, run, say)
        if main:
            _conclude(config, summary)
        if summary["status"] != "finished":
            tell_launcher(KeyboardInterrupt(), interrupted=True)
            raise typer.Exit(1)
        if main and config.export.to is not None:
            print("\n".join(export_as_asked(config, say).lines()))


def _leave_room_here(config: Config, planned: Planned) -> None:
    """A rehearsal that computes with values asks first whether they fit into this machine: before a tokenizer is looked
    for, rows are read or weights are fetched."""
    from trimtab.placement.profile import BYTES, FOUR_BIT_BYTES
    from trimtab.rehearse.process import rehearsal_holds

    plan, profile = planned.plan, planned.profile
    copies = plan.processes if plan.starts_launcher and plan.strategy == "data_parallel" else 1
    plain = profile.parameters - profile.four_bit
    weights = plain * BYTES[plan.weight_precision] + profile.four_bit * FOUR_BIT_BYTES
    rehearsal_holds(config.model.name, int(weights) * copies)


def _stay_beside(request: Request) -> None:
    """A run's own config.yaml resumes the run that it lies in, also where the folder was moved, copied or mounted."""
    from trimtab.config import load_config
    from trimtab.recipes.run_folder import STARTS
    from trimtab.recipes.run_mark import MARK

    config, file = request.config, Path(request.origin).expanduser()
    home = file.parent
    of_a_run = file.name == "config.yaml" and any(
        (home / name).is_file() for name in (MARK, STARTS, "plan.json")
    )
    if config.training.resume is not True or not of_a_run or config.output_dir is None:
        return
    named = Path(config.output_dir).expanduser()
    if named.resolve() == home.resolve() or load_config(file).output_dir != config.output_dir:
        return
    print(f"{file} names output_dir={named}, but lies in {home}: the run goes on there, where it lies")
    config.output_dir = str(home)


def _check_resume(config: Config, planned: Planned) -> None:
    """What would be refused by each of the processes is refused before they are started."""
    from trimtab.recipes.checkpoints import checkpoint_to_resume
    from trimtab.recipes.run_folder import RunFolder
    from trimtab.recipes.starting import Starting

    # What it skips is told by the processes.
    checkpoint = checkpoint_to_resume(
        config, RunFolder(Path(str(config.output_dir)).expanduser()), lambda text: None
    )
    if checkpoint is not None:
        Starting(config, planned.plan, checkpoint)


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
    from trimtab.models.load import shapes_only
    from trimtab.recipes.table import recipe_of
    from trimtab.rehearse.process import is_rehearsed

    if summary["status"] == "interrupted":
        print(
            f"\nstopped at step {summary['steps']} of {summary['planned_steps']}; a checkpoint is saved. Go on with\n"
            f"  trimtab train {shlex.quote(f'{config.output_dir}/config.yaml')} training.resume=true"
        )
        return
    answered = not shapes_only()  # what is answered there was never computed, and what is right of it neither
    for sample in summary["samples"] if answered else ():
        right = f"\nright   {sample['expected']}" if "expected" in sample else ""
        print(f"\nasked   {sample['prompt']}{right}\nbefore  {sample['before']}\nafter   {sample['after']}")
    loss = summary["eval_loss"]
    if loss["after"] is not None and loss["before"] is not None:
        change = (
            f" ({100 * (loss['after'] - loss['before']) / loss['before']:+.0f} %)" if loss["before"] else ""
        )
        print(f"\nheld-out loss {loss['before']:.3f} before, {loss['after']:.3f} after{change}")
    for name, value in summary.get("metrics", {}).items() if answered else ():
        print(f"{name} {value['before']:.3f} before, {value['after']:.3f} after")
    kept = "adapter" if config.method == "lora" else "model"
    steps = f"{summary['steps']} step{'s' * (summary['steps'] != 1)}"
    folder = Path(str(config.output_dir)).expanduser()
    names = [f"{kept}/", "config.yaml", "plan.json", "metrics.jsonl", "summary.json"]
    gone = [name for name in names if not (folder / name).exists()]
    print(
        f"{steps} in {summary['train_seconds']:.0f} s on {summary['device']}; kept in "
        f"{config.output_dir}: {', '.join(name for name in names if name not in gone)}"
    )
    if gone:
        print(f"! {', '.join(gone)}: written there, and deleted or moved by others while the run went on")
    if config.export.to is None and not is_rehearsed():
        run = shlex.quote(str(config.output_dir))
        spoken = recipe_of(config).family is CAUSAL_LM
        print(f"next: trimtab export {run} --to ollama" if spoken else f"next: trimtab report {run}")
