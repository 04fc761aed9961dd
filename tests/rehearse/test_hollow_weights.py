"""Saving where shapes only are rehearsed: files with holes, read again as shapes, and none of them left behind."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab import hollow
from trimtab.rehearse.namespaces import NotPermittedHere
from trimtab.rehearse.overlay import lay

Rehearse = Callable[..., dict[str, Any]]


def written(folder: Path, code: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    return path


@pytest.fixture
def permitted(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only where this machine lets a process lay folders over others."""
    try:
        lay([], tmp_path_factory.mktemp("session")).close()
    except NotPermittedHere as error:
        pytest.skip(str(error))


SAVES = """
    import os
    import sys
    import torch
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    os.chdir(sys.argv[1])
    shape = dict(hidden_size=1024, num_attention_heads=8, num_hidden_layers=2, intermediate_size=2048)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape)).to("cuda", torch.bfloat16)
    model.save_pretrained("whole")
    model.load_state_dict(load_file("whole/model.safetensors", device="cuda:0"))
    with safe_open("whole/model.safetensors", framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert opened.get_tensor("lm_head.weight").shape == opened.get_slice("lm_head.weight")[:].shape
    torch.save(model.state_dict(), "whole.pt")
    model.load_state_dict(torch.load("whole.pt", map_location="cuda"))
    for name in ("whole/model.safetensors", "whole.pt"):
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        assert held < os.path.getsize(name) < held + 20_000, (held, os.path.getsize(name))
        assert os.stat(name).st_blocks * 512 < held / 100
    adapted = get_peft_model(model, LoraConfig(r=64, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained("adapter")
    adapted.load_adapter("adapter", "again")
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad])
    adapted, optimizer = accelerator.prepare(adapted, optimizer)
    ids = torch.randint(0, 1000, (2, 64), device="cuda")
    for step in range(2):
        accelerator.backward(adapted(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state("state")
        accelerator.load_state("state")
    print("went on")
"""


def test_what_is_saved_is_loaded_again_and_nothing_of_it_is_unproven(
    rehearse: Rehearse, tmp_path: Path
) -> None:
    path = written(tmp_path, SAVES)
    report = rehearse(str(path), str(tmp_path), shapes_only=True, timeout=240)
    assert (report["verdict"], report["asked"]) == ("clean", []), report["text"]
    assert "went on" in report["stdout"]
    phases = {phase["name"] for phase in report["memory"]["cuda:0"]["phases"]}
    assert {"save", "resume"} <= phases
    assert not (tmp_path / "whole.pt").exists()


EARLY = """
    from safetensors.torch import load, load_model, save, save_file, save_model
    from safetensors import safe_open
    import os
    import sys
    import torch
    from torch import nn

    os.chdir(sys.argv[1])
    net = nn.Linear(512, 512).cuda()
    net(torch.randn(8, 512, device="cuda")).sum().backward()
    held = {name: value.detach() for name, value in net.state_dict().items()}
    save_file(held, "file.safetensors")
    save_model(net, "model.safetensors")
    with open("bytes.safetensors", "wb") as file:
        file.write(save(held))
    with open("bytes.safetensors", "rb") as file:
        net.load_state_dict(load(file.read()))
    load_model(net, "model.safetensors", device="cuda")
    with safe_open("file.safetensors", "pt", device="cuda") as opened:
        print("read", opened.get_tensor("weight").sum().item())
    from trimtab.hollow import is_hollow
    print("without values:", *filter(is_hollow, sorted(os.listdir())))
"""


def test_who_imported_safetensors_before_torch_saves_like_any_other(
    rehearse: Rehearse, tmp_path: Path
) -> None:
    """Then its import is under way when the virtual GPUs come, and its functions are in the program's own names."""
    report = rehearse(str(written(tmp_path, EARLY)), str(tmp_path), shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    assert "read ?" in report["stdout"]
    assert "without values: bytes.safetensors file.safetensors model.safetensors\n" in report["stdout"]
    assert "save" in {phase["name"] for phase in report["memory"]["cuda:0"]["phases"]}


SHARDS = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).cuda()
    for layer in (*model, model):
        fully_shard(layer)
    model(torch.randn(4, 2048, device="cuda")).sum().backward()
    state = {"model": get_model_state_dict(model)}
    dcp.save(state, checkpoint_id=sys.argv[1])
    dcp.load(state, checkpoint_id=sys.argv[1])
    set_model_state_dict(model, state["model"])
    print("file of", os.path.getsize(os.path.join(sys.argv[1], "__0_0.distcp")))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("every", [False, True])
def test_shards_are_saved_and_loaded(rehearse_warm: Rehearse, tmp_path: Path, every: bool) -> None:
    path = written(tmp_path, SHARDS)
    report = rehearse_warm(
        str(path), str(tmp_path / "dcp"), ranks=2, gpus=2, shapes_only=True, every_rank=every
    )
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
    assert "invalid fill" not in report["stderr"]  # DCP's warning of each tensor whose other parts it misses
    size = int(report["stdout"].split("file of ")[1].split()[0])
    half = 2 * 2048 * 2049 * 4 // 2
    assert half < size < half + 20_000


OVER = """
    import os
    import sys
    import torch
    from safetensors.torch import save_file
    from torch import nn

    os.chdir(sys.argv[1])
    weight = nn.Linear(2048, 2048).cuda().weight.detach()
    torch.save(weight, "new.pt")
    os.replace("new.pt", "moved.pt")
    save_file({"weight": weight}, "new.safetensors")
    torch.save(weight, "empty.pt")
    save_file({"weight": weight}, "empty.safetensors")

    def over_by_rename():
        torch.save(weight, "between.pt")
        os.replace("between.pt", "mine.pt")

    for save in (
        lambda: torch.save(weight, "mine.pt"),
        lambda: save_file({"weight": weight}, "mine.safetensors"),
        over_by_rename,
    ):
        try:
            save()
        except NotImplementedError as error:
            print("refused:", error)
"""


def test_written_in_place_nothing_is_replaced_and_nothing_is_left(ask: Rehearse, tmp_path: Path) -> None:
    path = written(tmp_path, OVER)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("mine.pt", "mine.safetensors"):
        (folder / name).write_text("mine")
    for name in ("empty.pt", "empty.safetensors"):
        (folder / name).touch()
    settings = {"gpus": 1, "shapes_only": True}
    report = ask(str(path), str(folder), ranks=None, timeout=120, settings=settings, in_place=True)
    assert report["verdict"] == "unproven"
    assert report["stdout"].count("is a file of yours") == 3
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "mine.pt": "mine",
        "mine.safetensors": "mine",
        "empty.pt": "",
        "empty.safetensors": "",
    }


@pytest.mark.usefixtures("permitted")
def test_kept_files_without_values_have_names_that_say_so(ask: Rehearse, tmp_path: Path) -> None:
    path = written(tmp_path, OVER)
    folder, kept = tmp_path / "folder", tmp_path / "kept"
    folder.mkdir()
    settings = {"gpus": 1, "shapes_only": True}
    report = ask(str(path), str(folder), ranks=None, timeout=120, settings=settings, keep=str(kept))
    assert report["verdict"] == "clean", report["text"]
    found = [file for file in kept.rglob("*") if file.is_file() and ".py" not in file.name]
    assert {file.name for file in found} == {
        f"{name}.shapes-only"
        for name in (
            "moved.pt",
            "new.safetensors",
            "empty.pt",
            "empty.safetensors",
            "mine.pt",
            "mine.safetensors",
        )
    }
    assert all(map(hollow.is_hollow, found))
    assert not any(folder.iterdir())
