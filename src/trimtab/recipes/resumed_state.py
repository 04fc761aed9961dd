"""What a trainer of Hugging Face takes from a checkpoint's state that belongs to this request, or to this folder.

It takes the old rhythm of logging, evaluating and saving over the one that is asked for now, and looks for the best
checkpoint where it lay when it was saved. Both are put right; nothing else of the state is touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class ResumedState(TrainerCallback):
    """Once the trainer has read its state."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.global_step:
            return
        state.compute_steps(args, state.max_steps)
        best = self._checkpoints / f"checkpoint-{state.best_global_step}"
        if state.best_global_step is not None and best.is_dir():
            state.best_model_checkpoint = str(best)
