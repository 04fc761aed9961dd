"""TRL's GRPOTrainer for a model that the plan has placed, split or whole.

It changes two things at the edges: a split model answers on its input's device, and the reference of an adapter is the
model with the adapter off; and one in between: a resumed run takes prompts and completions in step. Rewards, masks,
log-probabilities and advantages then all live on the trainer's device, which the first batch proves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from trl import GRPOTrainer

from trimtab.errors import RequestError
from trimtab.fast.scored_tokens import use_frozen_head
from trimtab.models.sparse_head import use_sparse_head
from trimtab.monitor.logits import LogitsWatch
from trimtab.placement import PlacementFault, PlacementPlan, bare_model, return_outputs
from trimtab.placement.verify import same_device
from trimtab.rewards.builtin import text_of
from trimtab.rewards.check import plain_prompt

REFERENCE = "ref"


class PlacedGRPOTrainer(GRPOTrainer):
    """GRPO on the plan's devices."""

    def __init__(
        self,
        *args: Any,
        plan: PlacementPlan,
        show: int = 0,
        say: Callable[[str], None] = lambda line: None,
        **kwargs: Any,
    ) -> None:
        """`show`: how many completions `on_completions` gets at every log, and `latest_completions` gives."""
        super().__init__(*args, **kwargs)
        self._show = show
        self.on_completions: Callable[[int, list[dict[str, Any]]], None] | None = None
        """Gets the step and its completions, each with its rewards."""
        self.on_bad_logits: Callable[..., None] | None = None
        """Gets the step, whether this process had them, what was asked, and how to run it again; ends the run."""
        self._proved = False
        policy: Any = self.model
        self._bare = bare_model(policy)
        if REFERENCE in getattr(policy, "peft_config", {}):
            # TRL copies an adapter that it is given; ours starts at zero, so the model without it is the same.
            policy.delete_adapter(REFERENCE)
        for model in (policy, self.ref_model):
            if model is None:
                continue
            self._choose_head(bare_model(model), plan, say)
            if plan.strategy == "split":
                return_outputs(model)

    def _choose_head(self, model: Any, plan: PlacementPlan, say: Callable[[str], None]) -> None:
        """Log-probabilities by a head that is not trained, where it is proved; else on the CPU by the sparse one."""
        settings: Any = self.args
        if plan.speed.head != "chunked":
            why = plan.reasons.get("speed.head", "speed.head is plain")
        elif settings.cast_lm_head_to_fp32 or self._entropy_bonus_enabled:
            why = "the entropy is trained on, or the head is asked for in fp32"
        else:
            why = use_frozen_head(model, temperature=self.temperature) or ""
        if why and "head" in plan.speed.demanded:
            raise RequestError.of("speed.head=chunked was asked for", why, "set speed.head: auto")
        if why and plan.kind == "cpu":
            use_sparse_head(model, temperature=self.temperature)
        elif why:
            say(f"log-probabilities by TRL's own head: {why}")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self._proved:
            self._prove(batch)
        return batch

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        watch = LogitsWatch()
        with watch.on(self._bare):
            told = super()._generate_single_turn(*args, **kwargs)
        if self.on_bad_logits is not None and not self.use_vllm:
            # All processes end together: the model is the same, a prompt may not be.
            bad = watch.bad(self.accelerator.device)
            if self.accelerator.num_processes > 1:
                bad = self.accelerator.reduce(bad, reduction="sum")
            # The one wait for a set of completions, whose tokens are read right after it.
            if bad.item():
                self.on_bad_logits(self.state.global_step + 1, watch.found, watch.inputs, self._logits_again)
        return told

    def _logits_again(self, one: Any) -> torch.Tensor:
        """The forward pass over what was asked and drawn."""
        self._bare.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            logits: torch.Tensor = self._bare(**one.inputs).logits
        return logits.float().sum()

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scored = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        if not self._proved:
            names = ("log-probabilities", "entropies", "auxiliary loss")
            self._prove({n: t for n, t in zip(names, scored, strict=True) if t is not None})
        return scored

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._step == 0:
            # TRL counts from 0 after a resume too. From a checkpoint amid the steps on one set of completions it would
            # take every later set half a turn late, with the prompts of the one before.
            self._step = self.state.global_step % self.num_iterations * self.args.gradient_accumulation_steps
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._proved = True
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        training = self.model is not None and self.model.training and "train_loss" not in logs
        super().log(logs, start_time)
        if training and self.on_completions is not None and self._show:
            self.on_completions(self.state.global_step, self.latest_completions())

    def latest_completions(self) -> list[dict[str, Any]]:
        """The first completions of the latest batch, with their rewards."""
        logs: dict[str, Any] = self._logs
        rows = zip(logs["prompt"], logs["completion"], logs["advantages"], strict=False)
        return [
            {
                "prompt": plain_prompt(prompt),
                "completion": text_of(completion),
                # TRL has NaN where a reward did not apply.
                "rewards": {
                    name: None if math.isnan(values[index]) else values[index]
                    for name, values in logs["rewards"].items()
                },
                "advantage": advantage,
            }
            for index, (prompt, completion, advantage) in enumerate(islice(rows, self._show))
        ]

    def _prove(self, tensors: dict[str, Any]) -> None:
        """Everything that meets in the loss is on the trainer's device; looked at in the first step alone."""
        astray = {
            name: value.device
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor) and not same_device(value.device, self.accelerator.device)
        }
        if astray:
            found = ", ".join(f"{name} on {device}" for name, device in astray.items())
            raise PlacementFault(
                f"{found}; the trainer is on {self.accelerator.device}, where the loss is made"
            )
