"""What fills a GPU that is too small, where it is neither the batch nor the model that is trained; and that looking for
it holds nothing back."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

Rehearse = Callable[..., dict[str, Any]]
GIB = 1 << 30

BESIDE = """
    import copy
    import torch
    from torch import nn

    def run(second):
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
        other = second(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            rows = torch.randn(64, 4096, device="cuda")
            goal = other(rows).detach() if RUNS else 0
            (model(rows) - goal).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run(lambda model: copy.deepcopy(model).WHERE.requires_grad_(False))  # cause
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("runs", [False, True])
def test_a_copy_that_nothing_runs_is_named(rehearse_warm: Rehearse, tmp_path: Path, runs: bool) -> None:
    """Four times the weights (512 MiB) are needed and there is room for three; a teacher that runs is no such copy."""
    path = _written(tmp_path, BESIDE.replace("RUNS", str(runs)).replace("WHERE", "cuda()"))
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=2 * GIB)
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    named = found["cause"] is not None and "no optimizer trains them" in found["cause"]["why"]
    assert named is not runs, report["text"]
    if named:
        assert found["cause"]["line"] in marked_lines(path, "cause")
        assert "512 MiB of weights" in found["cause"]["why"]
        assert "Keep them on the host" in found["fix"]


def test_a_copy_on_the_host_takes_nothing(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = _written(tmp_path, BESIDE.replace("RUNS", "False").replace("WHERE", "cpu()"))
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=2 * GIB)
    assert report["verdict"] == "clean", report["text"]


COPIED = """
    import copy
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Net().requires_grad_(False).cuda()
    optimizer = torch.optim.SGD(model.layers[-1].requires_grad_(True).parameters(), lr=0.1)
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept = copy.deepcopy(model)  # cause
    torch.save(kept.state_dict(), "kept.pt")
"""


def test_a_gpu_that_is_full_in_the_midst_of_a_copy(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """Some of eight layers (64 MiB each) have been copied: nothing of the copy is whole but these layers."""
    path = _written(tmp_path, COPIED)
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=int(1.1 * GIB))
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    assert not any("IdleModels" in note for note in report["notes"]), report["text"]
    assert found["where"]["line"] in marked_lines(path, "cause")
    assert found["cause"]["line"] in marked_lines(path, "cause")
    assert "of weights lie on cuda:0 since this line" in found["cause"]["why"]
    assert found["fix"].startswith("Make the copy on the host"), report["text"]


ATTENTION = """
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(256, 768)

        def forward(self, x):
            q, k, v = self.qkv(x).view(4, 2048, 3, 8, 32).permute(2, 0, 3, 1, 4)LAID
            ATTEND  # cause
            return y.transpose(1, 2).reshape(4, 2048, 256)

    model = nn.Sequential(Attention(), Attention()).cuda()
    model(torch.randn(4, 2048, 256, device="cuda")).square().mean().backward()
"""
BY_HAND = "w = (q @ k.transpose(-1, -2)).softmax(-1)"
SDPA = "y = nn.functional.scaled_dot_product_attention(q, k, v)"
STRIDED = ".transpose(-1, -2).contiguous().transpose(-1, -2)"


@pytest.mark.parametrize(
    ("attend", "laid", "said"),
    [
        (
            f"{BY_HAND} @ v".replace("w = ", "y = "),
            "",
            "Compute it by torch.nn.functional.scaled_dot_product",
        ),
        (
            SDPA,
            STRIDED,
            "No fused kernel takes this attention, and the plain one keeps the scores of all pairs",
        ),
        (SDPA, "", ""),
        ("y = nn.functional.elu(q.repeat(1, 1, 1, 64)).sum(-1, keepdim=True).softmax(-1) * v", "", None),
    ],
    ids=["by hand", "strided", "fused", "a softmax of something else"],
)
def test_the_scores_of_all_pairs(
    rehearse_warm: Rehearse, tmp_path: Path, attend: str, laid: str, said: str | None
) -> None:
    """512 MiB of scores, several times; fused kernels keep none of them."""
    path = _written(tmp_path, ATTENTION.replace("LAID", laid).replace("ATTEND", attend))
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=int(0.9 * GIB))
    if said == "":
        assert report["verdict"] == "clean", report["text"]
        return
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    if said is None:
        assert "scaled_dot_product" not in found["fix"]
        return
    assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]
    assert found["fix"].startswith(said), report["text"]
    assert ("stride 1" in found["fix"]) is (laid == STRIDED)


STAGES = """
    import gc
    import torch
    from torch import nn

    def stage(model, optimizer):
        for _ in range(2):
            model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
    first = torch.optim.Adam(model.parameters(), fused=True)  # cause
    AHEAD
    stage(model, first)
    BETWEEN
    second = torch.optim.Adam(model.parameters(), fused=True)
    stage(model, second)
"""


@pytest.mark.parametrize("how", ["held", "let go", "by turns"])
def test_an_optimizer_that_steps_no_more_is_named(rehearse_warm: Rehearse, tmp_path: Path, how: str) -> None:
    """Weights, gradients and two moments (2 GiB) fit, the first stage's moments (1 GiB) beside them do not."""
    text = STAGES.replace("BETWEEN", "del first; gc.collect()" if how == "let go" else "")
    if how == "by turns":  # both are there from the beginning: neither follows the other
        second = "second = torch.optim.Adam(model.parameters(), fused=True)"
        text = text.replace(second, "").replace("AHEAD", second)
    path = _written(tmp_path, text.replace("AHEAD", ""))
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=int(2.9 * GIB))
    if how == "let go":
        assert report["verdict"] == "clean", report["text"]
        return
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    named = found["cause"] is not None and "steps no more" in found["cause"]["why"]
    assert named is (how == "held"), report["text"]
    if named:
        assert found["cause"]["line"] in marked_lines(path, "cause")
        assert found["cause"]["why"].startswith("1.0 GiB on cuda:0")
        assert "gc.collect()" in found["fix"]


GATHERED = """
    import torch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        GATHER
        optimizer.step()
        optimizer.zero_grad()
"""
WAYS = {
    "a list": (
        "losses = []",
        "for _ in range(8):",
        "    losses.append(model(torch.randn(8192, 4096, device='cuda')).square().mean())  # cause",
        "torch.stack(losses).mean().backward()",
    ),
    "a sum": (
        "total = 0",
        "for _ in range(8):",
        "    loss = model(torch.randn(8192, 4096, device='cuda')).square().mean()",
        "    total = total + loss  # cause",
        "total.backward()",
    ),
    "one by one": (
        "for _ in range(8):",
        "    loss = model(torch.randn(65536, 4096, device='cuda')).square().mean()",
        "    loss.backward()",
    ),
}


@pytest.mark.parametrize("way", [*WAYS])
def test_passes_that_wait_for_one_backward(rehearse_warm: Rehearse, tmp_path: Path, way: str) -> None:
    path = _written(tmp_path, GATHERED.replace("GATHER", "\n        ".join(WAYS[way])))
    report = rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=3 * GIB)
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    waits = found["cause"] is not None and "before the loop ends" in found["cause"]["why"]
    assert waits is (way != "one by one"), report["text"]
    if waits:
        assert found["cause"]["line"] in marked_lines(path, "cause")
        assert "send each loss backward" in found["fix"]


IN_A_FUNCTION = """
    import torch
    from torch import nn

    def train():
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            rows = torch.randn(65536, 1024, device="cuda")
            out = model(rows)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            del rows, out

    train()
"""


def test_who_looks_at_a_full_gpu_holds_nothing_back(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """Before Python 3.13 a frame that was looked at keeps what its names held, and the need would be told too high."""
    path = _written(tmp_path, IN_A_FUNCTION)
    small, large = (
        rehearse_warm(str(path), gpus=1, shapes_only=True, memory_bytes=size) for size in (2 * GIB, 80 * GIB)
    )
    assert (small["verdict"], large["verdict"]) == ("fault", "clean"), small["text"]
    peaks = [report["memory"]["cuda:0"]["peak_bytes"] for report in (small, large)]
    assert peaks[0] == peaks[1]


EVALUATED = """
    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            ids = torch.arange(64)
            return {"input_ids": ids, "labels": ids}

    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                         num_attention_heads=2))
    arguments = TrainingArguments("out", per_device_eval_batch_size=4, report_to=[])
    trainer = Trainer(model, arguments, eval_dataset=Rows(), compute_metrics=lambda told: {})
    trainer.evaluate()  # where
"""


def test_predictions_that_a_trainer_gathers(rehearse_warmer: Rehearse, tmp_path: Path) -> None:
    path = _written(tmp_path, EVALUATED)
    report = rehearse_warmer(str(path), gpus=1, shapes_only=True, memory_bytes=GIB)
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    assert found["where"]["line"] in marked_lines(path, "where"), report["text"]
    assert "keeps the predictions of every batch" in found["cause"]["why"], report["text"]
    assert "eval_accumulation_steps" in found["fix"]
    assert "preprocess_logits_for_metrics" in found["fix"]


BROUGHT = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 32000)

        def forward(self, rows):
            scores = self.layer(rows)
            return scores.logsumexp(-1).sum().reshape(1) if INSIDE else scores

    net = nn.DataParallel(Net().cuda(), device_ids=[0, 1])
    rows = torch.randn(4096, 64, device="cuda")
    given = net(rows)  # cause
    loss = given.sum() if INSIDE else given.logsumexp(-1).sum()
    loss.backward()
"""


def test_what_data_parallel_brings_to_one_gpu(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """500 MiB of scores are made on two GPUs, and brought to the first."""
    path = _written(tmp_path, BROUGHT.replace("INSIDE", "False"))
    report = rehearse_warm(str(path), gpus=2, shapes_only=True, memory_bytes=2 * GIB)
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    assert {found["cause"]["line"]} == marked_lines(path, "cause"), report["text"]
    assert "inside the module" in found["fix"]
    path = _written(tmp_path, BROUGHT.replace("INSIDE", "True"))
    report = rehearse_warm(str(path), gpus=2, shapes_only=True, memory_bytes=2 * GIB)
    assert report["findings"] == [], report["text"]


SAVED = """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=128000, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                                         num_attention_heads=2)).cuda()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **OPTIONS))  # cause
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        ids = torch.arange(64, device="cuda")[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_layers_that_peft_trains_whole(rehearse_warmer: Rehearse, tmp_path: Path) -> None:
    """Two layers of 125 MiB, copied, with gradients and two moments."""
    path = _written(tmp_path, SAVED.replace("OPTIONS", '{"modules_to_save": ["embed_tokens", "lm_head"]}'))
    report = rehearse_warmer(str(path), gpus=1, shapes_only=True, memory_bytes=GIB + GIB // 2)
    (found,) = [one for one in report["findings"] if one["kind"] == "out-of-memory"]
    assert {found["cause"]["line"]} == marked_lines(path, "cause"), report["text"]
    assert "trainable_token_indices" in found["fix"]
    path = _written(tmp_path, SAVED.replace("OPTIONS", '{"trainable_token_indices": [7]}'))
    report = rehearse_warmer(str(path), gpus=1, shapes_only=True, memory_bytes=GIB + GIB // 2)
    assert report["findings"] == [], report["text"]


REPLICAS = """
    import torch
    from torch import nn

    net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 256)) for _ in range(4)])
    net = nn.DataParallel(net.cuda(), device_ids=[0, 1])
    for _ in range(2):
        net(torch.randn(65536, 256, device="cuda")).sum().backward()
"""


def test_checkpointing_that_is_tried_reaches_the_replicas(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """A replica takes over what a layer holds: it would run the layer of the first GPU."""
    path = _written(tmp_path, REPLICAS)
    reports = [
        rehearse_warm(str(path), gpus=2, shapes_only=True, what_if=changes)
        for changes in ([], ["checkpointing"])
    ]
    assert [report["findings"] for report in reports] == [[], []], reports[1]["text"]
    plain, again = (report["memory"]["cuda:1"]["peak_bytes"] for report in reports)
    assert again < 0.8 * plain
