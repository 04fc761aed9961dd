"""The guard in a real Trainer: quiet in a healthy run, and it names what is wrong before the first step is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from trimtab.config.schema import LoraSettings
from trimtab.models.adapters import add_lora
from trimtab.placement import PlacementFault, PlacementGuard, PlacementPlan, bind_arguments, trainer_options
from trimtab.placement import guard as placement_guard

ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=64, **changes))


def arguments(tmp_path: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**(defaults | changes))


def train(model: nn.Module, guard: PlacementGuard, tmp_path: Path, **changes: Any) -> Trainer:
    trainer = Trainer(model=model, args=arguments(tmp_path, **changes), train_dataset=ROWS, callbacks=[guard])
    trainer.train()
    return trainer


HEALTHY = [
    "trainer device",
    "batches",
    "parameters",
    "buffers",
    "trainable",
    "trainable format",
    "optimizer",
    "gradients arrive",
    "gradients finite",
]


@pytest.mark.parametrize("plan", [PLAN, None], ids=["with a plan", "without a plan"])
def test_a_healthy_run_passes_and_is_told(plan: PlacementPlan | None, tmp_path: Path) -> None:
    said: list[str] = []
    guard = PlacementGuard(plan, said.append)
    model = tiny_llama()
    train(model, guard, tmp_path, max_steps=2)
    assert [check.name for check in guard.checks] == HEALTHY
    assert all(check.ok for check in guard.checks)
    assert said[0] == "✓ trainer device: cpu"
    assert said[1] == "✓ batches: cpu"
    assert len(said) == len(HEALTHY), "only the first step is looked at"
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters()), "nothing is left on the model"


def test_plan_options_and_guard_go_together(tmp_path: Path) -> None:
    args = arguments(tmp_path, **trainer_options(PLAN))
    bind_arguments(args, PLAN)
    guard = PlacementGuard(PLAN)
    Trainer(model=tiny_llama(), args=args, train_dataset=ROWS, callbacks=[guard]).train()
    assert [check.name for check in guard.checks] == HEALTHY


def test_adapters_in_a_trl_trainer(tmp_path: Path) -> None:
    model = add_lora(tiny_llama(), LoraSettings(r=2))
    guard = PlacementGuard(PLAN)
    args = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        **trainer_options(PLAN),
    )
    from datasets import Dataset

    SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=_tokenizer(),
        callbacks=[guard],
    ).train()
    assert [check.name for check in guard.checks] == HEALTHY


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")), eos_token="w2", pad_token="w2"
    )


def test_with_accumulation_the_check_comes_at_the_first_optimizer_step(tmp_path: Path) -> None:
    seen: list[int] = []

    class Count(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            seen.append(len(guard.checks))

    guard = PlacementGuard(PLAN)
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path, gradient_accumulation_steps=3),
        train_dataset=ROWS,
        callbacks=[guard, Count()],
    )
    trainer.train()
    assert seen == [len(HEALTHY) - 2] * 2
    assert len(guard.checks) == len(HEALTHY)


def test_a_guard_used_twice_checks_twice(tmp_path: Path) -> None:
    guard = PlacementGuard()
    train(tiny_llama(), guard, tmp_path)
    frozen_branch = tiny_llama()
    frozen_branch.unused = nn.Linear(2, 2)
    with pytest.raises(PlacementFault, match="unused"):
        train(frozen_branch, guard, tmp_path)


def adapted() -> nn.Module:
    return add_lora(tiny_llama(), LoraSettings(r=2))


def test_it_rests_until_a_factor_has_moved_and_looks_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    guard = PlacementGuard(PLAN)
    own = placement_guard.look

    def counted(*args: Any, **kwargs: Any) -> Any:
        looks.append(guard._step or 0)
        return own(*args, **kwargs)

    monkeypatch.setattr(placement_guard, "look", counted)
    # The rate of the first step is zero, so that the second factor moves in the second one.
    train(adapted(), guard, tmp_path, max_steps=5, warmup_steps=2, learning_rate=0.1)
    assert looks == [1, 3]
    assert guard.checks[-1].name == "gradients later"
    assert guard.checks[-1].ok


class SwitchedOff(TrainerCallback):
    """From the second step on one adapted module gets no gradient, as an expert that no token is sent to."""

    def __init__(self, half: bool) -> None:
        self._half = half

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            for name, parameter in kwargs["model"].named_parameters():
                if "layers.1.self_attn.q_proj.lora_" in name and not (self._half and "lora_B" in name):
                    parameter.grad = None


@pytest.mark.parametrize("half", [False, True])
def test_a_module_that_a_later_step_leaves_out_is_waited_for(half: bool, tmp_path: Path) -> None:
    guard = PlacementGuard(PLAN)
    trainer = Trainer(
        model=adapted(),
        args=arguments(tmp_path, max_steps=4, learning_rate=0.1),
        train_dataset=ROWS,
        callbacks=[SwitchedOff(half), guard],
    )
    if half:
        # One of its factors has a gradient: something is wrong with the other.
        with pytest.raises(PlacementFault, match=r"layers\.1\.self_attn\.q_proj\.lora_A"):
            trainer.train()
        return
    trainer.train()
    assert guard.checks[-1].ok is None
    assert "a token that is sent through them" in guard.checks[-1].detail


def test_whether_gradients_are_finite_is_asked_in_the_first_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, looked = tiny_llama(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0)  # as of rewards that are all alike: it waits
    guard = PlacementGuard(PLAN)
    trainer = Trainer(
        model=model, args=arguments(tmp_path, max_steps=3), train_dataset=ROWS, callbacks=[guard]
    )
    monkeypatch.setattr(guard, "_look", lambda name, parameter: looked.append(trainer.state.global_step))
    trainer.train()
    assert guard.checks[-1].ok is None
    assert set(looked) == {0}


def test_the_trainer_uses_another_device_than_the_plan(tmp_path: Path) -> None:
    plan = PlacementPlan(
        device="cuda:1", precision="fp32", scaler=False, weight_precision="fp32", strategy="single"
    )
    with pytest.raises(PlacementFault, match="trainer device: cpu, the plan says cuda:1; give the trainer"):
        train(tiny_llama(), PlacementGuard(plan), tmp_path)


def test_the_batches_go_to_another_device_than_the_plan(tmp_path: Path) -> None:
    """What a left-over ACCELERATE_TORCH_DEVICE does: arguments and batches part ways."""
    args = arguments(tmp_path)
    args.distributed_state.device = torch.device("meta")
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=ROWS, callbacks=[PlacementGuard(PLAN)])
    with pytest.raises(PlacementFault, match="batches: meta, the plan says cpu"):
        trainer.train()


class Anchored(nn.Module):
    """A module that does not move when its model does, with a buffer elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, device="meta"), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


@pytest.mark.parametrize("plan", [PLAN, None], ids=["with a plan", "without a plan"])
def test_a_stray_buffer_is_named(plan: PlacementPlan | None, tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.anchored = Anchored()
    with pytest.raises(PlacementFault, match=r"model\.anchored\.table on meta, planned on cpu"):
        train(model, PlacementGuard(plan), tmp_path)


def test_a_parameter_unfrozen_after_the_optimizer_was_made_is_named(tmp_path: Path) -> None:
    model = tiny_llama()
    model.lm_head.requires_grad_(False)
    trainer = Trainer(
        model=model, args=arguments(tmp_path), train_dataset=ROWS, callbacks=[PlacementGuard(PLAN)]
    )
    trainer.create_optimizer()
    model.lm_head.requires_grad_(True)
    with pytest.raises(PlacementFault, match=r"optimizer: lacks 1 trainable tensors: lm_head\.weight"):
        trainer.train()


def test_nothing_to_train_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlacementFault, match="nothing would be trained"):
        train(tiny_llama().requires_grad_(False), PlacementGuard(PLAN), tmp_path)


def test_a_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.norm.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(
        PlacementFault, match=r"20 of 21 trainable tensors got none: model\.embed_tokens\.weight"
    ):
        train(model, PlacementGuard(PLAN), tmp_path)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_a_nan_gradient_is_named_also_when_clipping_spreads_it(max_grad_norm: float, tmp_path: Path) -> None:
    model = tiny_llama()
    before = model.lm_head.weight.detach().clone()
    model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(PlacementFault, match=r"gradients finite: NaN or infinity in 1: model\.norm\.weight$"):
        train(model, PlacementGuard(PLAN), tmp_path, max_grad_norm=max_grad_norm)
    assert torch.equal(model.lm_head.weight, before), "the optimizer has not stepped"


def test_trainable_weights_in_16_bits_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementFault, match=r"21 trainable tensors in bf16, planned in fp32"):
        train(tiny_llama().to(torch.bfloat16), PlacementGuard(PLAN), tmp_path)


def test_pure_bf16_is_a_plain_trainers_own_choice(tmp_path: Path) -> None:
    guard = PlacementGuard()
    train(tiny_llama().to(torch.bfloat16), guard, tmp_path)
    assert {check.name: check.detail for check in guard.checks}["trainable format"] == "bf16"


def test_with_a_scaler_gradients_must_arrive_but_may_overflow() -> None:
    """fp16 needs CUDA, so the callback is called here as the trainer would call it."""
    plan = PlacementPlan(
        device="cpu", precision="fp16", scaler=True, weight_precision="fp16", strategy="single"
    )
    model, guard = nn.Linear(2, 2), PlacementGuard(plan)

    class Args:
        device, deepspeed = torch.device("cpu"), None

    guard.on_train_begin(Args, None, None, model=model)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad.fill_(float("inf"))
    guard.on_pre_optimizer_step(Args, None, None, model=model)
    assert guard.checks[-1].name == "gradients arrive"
    model.bias.grad = None
    guard.on_train_begin(Args, None, None, model=model)
    with pytest.raises(PlacementFault, match="1 of 2 trainable tensors got none: bias"):
        guard.on_pre_optimizer_step(Args, None, None, model=model)


RANKS = """
import sys, torch
sys.path.insert(0, {here!r})
from test_guard import ROWS, arguments, tiny_llama
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from trimtab.hardware import probe
from trimtab.placement import (PlacementGuard, PlacementRequest, bind_arguments, prepare_process, resolve,
                               trainer_options, verify, verify_gradients)

plan = resolve(PlacementRequest(device="cpu"), probe())
assert (plan.strategy, plan.processes, plan.launcher) == ("data_parallel", 2, "torchrun"), plan
prepare_process(plan)
args = arguments({out!r}, **trainer_options(plan))
bind_arguments(args, plan)
assert args.world_size == 2 and args.n_gpu == 0, (args.world_size, args.n_gpu)

for given in (plan, None):
    guard = PlacementGuard(given)
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=ROWS, callbacks=[guard])
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert len(guard.checks) == 9, guard.checks

wrapped = trainer.model_wrapped
checks = verify(wrapped, plan, trainer.optimizer)
assert checks[0].detail == "21 on cpu", checks
wrapped(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
verify_gradients(wrapped)
wrapped.module.lm_head.weight.grad = None
try:
    verify_gradients(wrapped)
except Exception as error:
    assert "module.lm_head.weight" in str(error), error
    print("rank", args.process_index, "passed", flush=True)
"""


@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        RANKS.format(here=str(Path(__file__).parent), out=str(tmp_path / "out")), encoding="utf-8"
    )
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert {"rank 0 passed", "rank 1 passed"} <= set(result.stdout.splitlines())
