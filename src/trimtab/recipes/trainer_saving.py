"""Makes a trainer of Hugging Face write its checkpoints whole, and end with the best one only where that is whole.

The trainer writes what it always writes, into a folder that gets its name when every process is done with it. It never
deletes: which checkpoints go is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trimtab.files import sync_file
from trimtab.recipes.checkpoints import (
    begin_saving,
    check_best,
    fault,
    finish_saving,
    name_of,
    rotate,
    saving_place,
    stop_saving,
)
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.unsealed import TRAINER_STATE
from trimtab.shortage import look_at_the_disk


def save_whole(trainer: Any, run: RunFolder, keep: int | None, say: Callable[[str], None]) -> None:
    """From now on the trainer's checkpoints are whole or not there; at most `keep` stay, the best among them."""
    save, load_best = trainer._save_checkpoint, trainer._load_best_model
    usual_place = trainer._get_output_dir

    def saved_whole(model: Any, trial: Any) -> None:
        step, main = trainer.state.global_step, trainer.args.should_save
        place = saving_place(run.checkpoints, step)
        if main:
            begin_saving(run.checkpoints, step)
        trainer.accelerator.wait_for_everyone()
        trainer._get_output_dir = lambda trial: str(place)
        try:
            save(model, trial)
            _name_the_best(trainer, place, run.checkpoints)
            made = place / name_of(step)
            for file in made.glob(f"rng_state_{trainer.args.process_index}.pth"):
                sync_file(file)  # on another machine than the main process's, only this one can
            trainer.accelerator.wait_for_everyone()
            if main:
                # It told the place in which the checkpoint was made; the file is to tell the final one.
                trainer.state.save_to_json(str(made / TRAINER_STATE))
                finish_saving(run.checkpoints, step)
                best = trainer.state.best_model_checkpoint
                rotate(run.checkpoints, keep, trainer.state.best_global_step if best else None)
        except BaseException as error:
            if main:
                look_at_the_disk(error, run.checkpoints)
                stop_saving(run.checkpoints, step)  # a full disk needs its room at once
            raise
        finally:
            trainer._get_output_dir = usual_place
        trainer.accelerator.wait_for_everyone()

    def loaded_best() -> None:
        state = trainer.state
        check_best(Path(state.best_model_checkpoint), run.path)
        if state.best_global_step != state.global_step:  # else the model still is what it was saved as
            load_best()

    trainer._save_checkpoint, trainer._load_best_model = saved_whole, loaded_best
    # TRL writes a card of its own beside the checkpoints with each save; ours lies beside the kept weights.
    trainer.create_model_card = lambda *args, **kwargs: None
    trainer.add_callback(BestIsWhole(run, keep, say))


def gather_the_adapter(trainer: Any) -> None:
    """From now on, of a sharded model with an adapter only what was trained is gathered to be saved.

    Accelerate would gather the frozen weights with it, 140 GB of a model of 70B into the first process's memory, of
    which PEFT then writes the adapter.
    """
    from peft import PeftModel

    names = [name for name, _ in trainer.model.named_parameters()]
    # PEFT writes an embedding that has an adapter whole.
    if not isinstance(trainer.model, PeftModel) or any("lora_embedding" in name for name in names):
        return
    accelerator = trainer.accelerator
    gather = accelerator.get_state_dict

    def gathered(model: Any, unwrap: bool = True) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if not accelerator.is_fsdp2:
            return gather(model, unwrap)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(model, options=options)

    accelerator.get_state_dict = gathered


def _name_the_best(trainer: Any, place: Path, checkpoints: Path) -> None:
    best = trainer.state.best_model_checkpoint
    if best is not None and Path(best).parent == place:
        trainer.state.best_model_checkpoint = str(checkpoints / Path(best).name)


class BestIsWhole(TrainerCallback):
    """A run that goes on looks whether the best checkpoint so far still is what it was, and says where it is not."""

    def __init__(self, run: RunFolder, keep: int | None, say: Callable[[str], None]) -> None:
        self._run, self._keep, self._say = run, keep, say

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_global_step:
            self._look_at_the_best(state)
        if args.should_save and state.global_step:
            # A kill may have come between the last save and the removal that it makes room for.
            rotate(
                self._run.checkpoints,
                self._keep,
                state.best_global_step if state.best_model_checkpoint else None,
            )

    def _look_at_the_best(self, state: Any) -> None:
        own = self._run.checkpoints / name_of(state.best_global_step)
        # In the run's own folder first: it may have been moved since, and its state tells the old place.
        best = own if own.is_dir() or not state.best_model_checkpoint else Path(state.best_model_checkpoint)
        if reason := fault(best):
            self._say(
                f"warning: the best checkpoint so far, {best.name}, is damaged: {reason}\n"
                "  its weights cannot be kept: the best is looked for among those from here on"
            )
            state.best_model_checkpoint = state.best_global_step = state.best_metric = None
        else:
            state.best_model_checkpoint = str(best)
