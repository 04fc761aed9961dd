"""`rehearse --shapes-only`: models from their config alone, memory on each GPU, and what was not proven."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from marks import marked_lines
from transformers import LlamaConfig

Rehearse = Callable[..., dict[str, Any]]
WEIGHTS = 8_030_261_248
"""Of Llama 3's 8B."""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model's folder that has a config and nothing else."""
    folder = tmp_path / "bare"
    folder.mkdir()
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256}
    more = {"num_key_value_heads": 8, "intermediate_size": 14336, "dtype": "bfloat16"}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def written(folder: Path, code: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    return path


LORA = """
    import sys
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).to("cuda")
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(2):
        ids = torch.randint(0, 1000, (2, 64), device="cuda")
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")  # read
"""


def test_a_model_without_weights_runs_and_its_values_are_not_shown(
    rehearse_warm: Rehearse, tmp_path: Path, bare: Path
) -> None:
    path = written(tmp_path, LORA)
    report = rehearse_warm(str(path), str(bare), shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    assert "loss ?" in report["stdout"]
    assert report["steps"] == 2
    peak = report["memory"]["cuda:0"]["peak_bytes"]
    assert 2 * WEIGHTS < peak < 2 * WEIGHTS + 2**31
    assert [asked["how"] for asked in report["asked"]] == ["value"]
    assert report["asked"][0]["where"]["line"] in marked_lines(path, "read")
    assert "clean in shapes" in report["text"]
    assert "program.py" in report["text"]


def test_a_model_is_loaded_to_the_device_in_whose_context_it_is_loaded(
    rehearse_warm: Rehearse, tmp_path: Path, bare: Path
) -> None:
    code = """
        import os, sys
        import torch
        from transformers import AutoModelForCausalLM

        os.environ["LOCAL_RANK"] = "1"
        with torch.device("cuda:1"):
            one = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        two = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cuda")
        print("devices", one.device, two.device, "end")
    """
    report = rehearse_warm(str(written(tmp_path, code)), str(bare), shapes_only=True)
    assert "devices cuda:1 cuda:1 end" in report["stdout"], report["text"]


def test_weights_that_threads_read_do_not_take_the_memory_warmed_up_on_another_stream(
    rehearse_warm: Rehearse, tmp_path: Path, bare: Path
) -> None:
    code = """
        import sys
        import torch
        from transformers import AutoModelForCausalLM

        with torch.cuda.stream(torch.cuda.Stream()):
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map={"": 0})
        print("reserved", torch.cuda.memory_reserved())
    """
    report = rehearse_warm(str(written(tmp_path, code)), str(bare), shapes_only=True)
    reserved = int(report["stdout"].split("reserved ")[1].split()[0])
    assert 4 * WEIGHTS < reserved < 4 * WEIGHTS + 2**28


def test_a_way_that_hangs_on_a_value_is_not_proven(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        import torch
        from torch import nn

        model = nn.Linear(1024, 1024).cuda()
        loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
        if loss < 3:  # decided
            loss.backward()
        """,
    )
    report = rehearse_warm(str(path), shapes_only=True)
    assert (report["verdict"], report["findings"]) == ("unproven", [])
    assert {(asked["how"], asked["where"]["line"]) for asked in report["asked"]} == {
        ("decision", line) for line in marked_lines(path, "decided")
    }


def test_too_much_for_the_gpu_is_found_with_device_and_line(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        from torch import nn

        model = nn.Linear(1 << 16, 1 << 15)
        model.to("cuda:1")  # where
        """,
    )
    report = rehearse_warm(str(path), shapes_only=True, memory_bytes=2**32)
    assert report["verdict"] == "fault"
    (finding,) = report["findings"]
    assert finding["kind"] == "out-of-memory"
    assert "GPU 1" in finding["message"]
    assert finding["where"]["line"] in marked_lines(path, "where")


def test_one_rank_stands_for_all(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn

        dist.init_process_group("nccl")
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 2048).cuda(), device_ids=[rank])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        counts = [torch.zeros(1, device="cuda") for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([3.0], device="cuda"))
        print("rank", dist.get_rank(), "of", dist.get_world_size(), "gathered", torch.cat(counts).sum().item())
        dist.destroy_process_group()
        """,
    )
    report = rehearse_warm(str(path), ranks=8, gpus=8, shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    assert report["stdout"].count("rank 0 of 8 gathered 24.0") == 1
    peaks = {figures["peak_bytes"] for figures in report["memory"].values()}
    assert len(report["memory"]) == 8
    assert len(peaks) == 1
    assert peaks.pop() > 5 * 2048 * 2048 * 4  # weights, gradients, two moments, the reducer's buckets
    assert any("rank 0 of 8 stands for all" in note for note in report["notes"])


def test_a_group_of_one_gets_what_it_handed_in(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        from torch import nn

        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2048, 2048).cuda(), device_ids=[0])
        with model.no_sync():
            model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        given = torch.tensor([3.0, 4.0], device="cuda")
        flat, part, summed = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda"), given.clone()
        dist.all_gather_into_tensor(flat, given)
        dist.reduce_scatter_tensor(part, given)
        dist.all_reduce(summed)
        print("of one", flat.tolist(), part.tolist(), summed.tolist())
        dist.destroy_process_group()
        """,
    )
    report = rehearse_warm(str(path), gpus=1, shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    assert "of one [3.0, 4.0] [3.0, 4.0] [3.0, 4.0]" in report["stdout"]


@pytest.mark.slow
def test_a_config_takes_the_memory_that_it_takes_with_values(rehearse: Rehearse, repository: Path) -> None:
    # Rows of one length: in shapes the longest come first.
    changes = (
        "samples.prompts=[]",
        "samples.held_out=0",
        "data.eval_fraction=0",
        "data.max_length=77",
        "data.train_on=all",
        # With values, what kernels would compute is computed plainly, and takes more.
        *("speed.head=plain", "speed.kernels=plain", "speed.padding=padded"),
    )
    peaks = {}
    for shapes_only in (False, True):
        report = rehearse(
            str(repository / "examples" / "sft.yaml"), *changes, gpus=1, max_steps=2, shapes_only=shapes_only
        )
        assert report["verdict"] == "clean", report["text"]
        peaks[shapes_only] = report["memory"]["cuda:0"]["peak_bytes"]
    assert peaks[True] == pytest.approx(peaks[False], rel=0.01)
    assert "loss ?" in report["stderr"]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["sft.yaml", "zeroth-order.yaml"])
def test_a_config_of_many_steps_comes_to_its_end(rehearse: Rehearse, repository: Path, example: str) -> None:
    changes = ("training.max_steps=100000", "zeroth.interval=3")[: 1 + example.startswith("zeroth")]
    report = rehearse(
        str(repository / "examples" / example), *changes, "device=cuda", gpus=1, shapes_only=True
    )
    assert report["verdict"] in ("clean", "unproven"), report["text"]
    assert "time ran out" not in report["text"]
    assert any("4 of the run's steps are made" in note for note in report["notes"])
    assert report["findings"] == []
    assert {"evaluate", "save"} <= {phase["name"] for phase in report["memory"]["cuda:0"]["phases"]}


@pytest.mark.slow
def test_a_config_whose_model_is_no_more_than_its_config(
    rehearse: Rehearse, repository: Path, tmp_path: Path
) -> None:
    LlamaConfig(hidden_size=256, num_hidden_layers=2, vocab_size=64000).save_pretrained(tmp_path / "bare")
    report = rehearse(
        *(str(repository / "examples" / "sft.yaml"), f"model={tmp_path / 'bare'}", "device=cuda"),
        gpus=1,
        shapes_only=True,
    )
    assert report["verdict"] == "unproven", report["text"]
    assert report["findings"] == []
    assert any("tokenizer of" in note and "is not here" in note for note in report["notes"])
    assert "kept in" in report["stdout"]
    assert "next:" not in report["stdout"], "its run folder is thrown away"
    assert report["stdout"].count("count as compiled ones") <= 1
    assert {"first step", "save"} <= {phase["name"] for phase in report["memory"]["cuda:0"]["phases"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_of_eight_gpus_is_rehearsed_with_nothing_fetched(
    rehearse: Rehearse, repository: Path
) -> None:
    example = repository / "examples" / "vision-8gpu.yaml"
    report = rehearse(
        str(example),
        timeout=800,
        gpus=8,
        gpus_given=True,
        shapes_only=True,
        max_steps=1,
        gpu_name="NVIDIA A100-SXM4-40GB",
        memory_bytes=42_298_834_944,
        capability=(8, 0),
    )
    assert report["verdict"] == "clean", report["text"]
    assert report["steps"] == 1
    weights = 2 * 8_464_000_000
    assert len(report["memory"]) == 8
    for figures in report["memory"].values():
        assert weights < figures["peak_bytes"] < figures["capacity_bytes"]
    assert "2 × 8 × 32 = 512" in report["stdout"]
    assert yaml.safe_load(example.read_text())["training"]["gradient_accumulation_steps"] == 32


@pytest.mark.parametrize(
    ("before", "error", "verdict"),
    [
        ("kept = rows[rows.sum(1) > 0]", "kept.view(3, -1)", "unproven"),
        ("kept = rows[:4]", "kept.view(3, -1)", "fault"),
        ("some = bool((rows > 0).any())", "if some in (True, False): raise ValueError(some)", "unproven"),
    ],
    ids=["a size that hangs on values", "a size that does not", "a way that hangs on values"],
)
def test_an_error_after_what_hangs_on_values_is_not_proven(
    rehearse_warm: Rehearse, tmp_path: Path, before: str, error: str, verdict: str
) -> None:
    code = f"import torch\nrows = torch.randn(4000, 1000, device='cuda')\n{before}\n{error}\n"
    report = rehearse_warm(str(written(tmp_path, code)), shapes_only=True)
    assert report["verdict"] == verdict, report["text"]
    assert (verdict == "fault") == bool(report["findings"])
    if verdict == "unproven":
        kind = error.partition("raise ")[2].partition("(")[0] or "RuntimeError"
        assert any(f"stopped with {kind}" in note and "program.py:3" in note for note in report["notes"])
