"""Shapes that a rehearsal chooses by itself, and files of weights that are too big to be read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.cli.train import _leave_room_here
from trimtab.diagnose.finding import Finding
from trimtab.errors import RequestError
from trimtab.rehearse import hints, process, room_here, run
from trimtab.rehearse.session import VARIABLE, Gathered, Settings
from trimtab.rehearse.target import Target

Rehearse = Callable[..., dict[str, Any]]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 512, "vocab_size": 1000, "dtype": "bfloat16"},
}
MODEL = """
    import sys
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=sys.argv[2])
    ids = torch.randint(0, 1000, (2, 32), device=model.device)
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        print("generated", model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=0).shape)
"""


def written(folder: Path, code: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    return str(path)


def model_folder(folder: Path, weights: str) -> Path:
    """A model's folder with a config, and with weights of which only the size is there, an index alone, or none."""
    made = folder / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    if weights == "file":
        with (made / "model.safetensors").open("wb") as file:
            file.truncate(1 << 42)
    if weights == "index":
        index = {
            "metadata": {"total_size": 1 << 42},
            "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"},
        }
        (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


@pytest.mark.parametrize("weights", ["file", "index"])
def test_shapes_are_chosen_where_weights_do_not_fit(
    rehearse_warmer: Rehearse, tmp_path: Path, weights: str
) -> None:
    model = model_folder(tmp_path, weights)
    report = rehearse_warmer(written(tmp_path, MODEL), str(model), "cuda:0")
    assert report["verdict"] == "clean", report["text"]
    assert report["shapes_only"]
    assert "4096.0 GiB of weights" in report["notes"][0]
    assert "by shapes alone" in report["text"]


@pytest.mark.parametrize("device_map", ["auto", "cuda:1"])
@pytest.mark.parametrize("weights", ["none", "index"])
def test_a_model_is_built_from_its_config_alone(
    rehearse_warmer: Rehearse, tmp_path: Path, weights: str, device_map: str
) -> None:
    model = model_folder(tmp_path, weights)
    report = rehearse_warmer(written(tmp_path, MODEL), str(model), device_map, shapes_only=True)
    assert [finding["kind"] for finding in report["findings"]] == []
    assert "generated torch.Size([2, 37])" in report["stdout"]
    found = {phase["name"] for told in report["memory"].values() for phase in told["phases"]}
    assert {"load", "first step", "generate"} <= found
    caches = [
        p["kinds"]["cache"] for t in report["memory"].values() for p in t["phases"] if p["name"] == "generate"
    ]
    assert max(caches) > 0


def test_a_config_alone_is_told_to_be_enough_for_shapes(rehearse_warmer: Rehearse, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "none")
    report = rehearse_warmer(written(tmp_path, MODEL), str(model), "cuda:0")
    assert [finding["kind"] for finding in report["findings"]] == ["other-error"]
    hint = f"{model} holds a model's config and no weights; --shapes-only rehearses it from that alone"
    assert report["notes"] == [hint]


def test_folders_are_looked_for_in_any_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path, "none")
    (tmp_path / "whole").mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / "whole" / name).write_text("{")
    message = f"{'x' * 5000} \0 ./model, '{tmp_path / 'model'}'. whole"
    findings, target = [Finding("other-error", message=message)], Target(("program.py",), "program.py")
    found = hints.hints(findings, Gathered(), target, shapes_only=False)
    assert [note.partition(" holds")[0] for note in found] == ["./model", str(tmp_path / "model")]


ORDER = """
    import sys
    import torch
    from transformers import AutoModelForCausalLM

    torch.cuda.memory._record_memory_history()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=sys.argv[2])
    done = torch.cuda.memory._snapshot()["device_traces"][0]
    print("sizes", *[entry["size"] for entry in done if entry["action"] == "alloc"])
"""


@pytest.mark.parametrize("device_map", ["cuda:0", "auto"])
def test_weights_come_in_the_order_of_their_names(
    rehearse_warmer: Rehearse, tmp_path: Path, device_map: str
) -> None:
    """As transformers fills one piece of memory with them: q, k and v do not lie side by side."""
    model = model_folder(tmp_path, "none")
    report = rehearse_warmer(written(tmp_path, ORDER), str(model), device_map, shapes_only=True)
    assert [finding["kind"] for finding in report["findings"]] == []
    mlp, norm, narrow, wide = 512 * 256 * 2, 512, 128 * 256 * 2, 256 * 256 * 2
    layer = norm, mlp, mlp, mlp, norm, narrow, wide, wide, narrow  # k, o, q, v
    assert " ".join(map(str, layer)) in report["stdout"]


def test_what_was_written_for_real_is_not_written_twice(ask: Rehearse, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    with file.open("wb") as opened:
        opened.truncate(1 << 42)
    code = """
        import torch
        from safetensors.torch import load_file

        open("log", "a").write("once")
        load_file("weights.safetensors")
    """
    report = ask(written(tmp_path, code), ranks=None, timeout=120, settings={}, in_place=True)
    assert (report["verdict"], report["shapes_only"]) == ("unproven", False)
    assert any("--shapes-only" in note for note in report["notes"])
    assert (tmp_path / "log").read_text() == "once"


LOAD = """
    import sys
    import torch
    from safetensors.torch import load_file

    file = sys.argv[1]
    kept = torch.load(file, map_location=sys.argv[2]) if file.endswith("pt") else load_file(file, device=sys.argv[2])
    print("ids", kept["ids"].tolist())
    layer = torch.nn.Linear(1 << 15, 1 << 20, bias=False, dtype=torch.bfloat16)
    layer.load_state_dict({"weight": kept["weight"]})
    layer.cuda()
    torch.nn.functional.linear(torch.ones(2, 1 << 15, dtype=torch.bfloat16, device="cuda"), layer.weight)
    print("weight", kept["weight"].device, tuple(kept["weight"].shape))
"""
SHAPE = (1 << 20, 1 << 15)


def safetensors_file(path: Path) -> None:
    size = 2 * SHAPE[0] * SHAPE[1]
    head = {
        "ids": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]},
        "weight": {"dtype": "BF16", "shape": list(SHAPE), "data_offsets": [24, 24 + size]},
    }
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<3q", 7, 8, 9))
        file.truncate(8 + len(text) + 24 + size)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_file_that_no_machine_holds_is_loaded_by_its_head(
    rehearse_warm: Rehearse, tmp_path: Path, device: str
) -> None:
    file = tmp_path / "weights.safetensors"
    safetensors_file(file)
    report = rehearse_warm(written(tmp_path, LOAD), str(file), device, shapes_only=True, memory_bytes=1 << 38)
    assert report["verdict"] == "clean", report["text"] + report["stderr"]
    assert "ids [7, 8, 9]" in report["stdout"]
    assert f"weight {device} {SHAPE}" in report["stdout"]


def test_torch_load_leaves_big_weights_in_their_file(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    code = """
        import torch

        kept = torch.load("weights.pt")
        print("few", kept["few"].tolist(), "tied", kept["tied"].data_ptr() == kept["big"].data_ptr())
        layer = torch.nn.Linear(1 << 11, 1 << 14, bias=False)
        layer.load_state_dict({"weight": kept["big"]})
        if layer.cuda().weight[0, 0] > 2:
            print("not reached")
    """
    big = torch.zeros(1 << 14, 1 << 11)
    torch.save({"few": torch.tensor([1, 2]), "big": big, "tied": big}, tmp_path / "weights.pt")
    report = rehearse_warm(written(tmp_path, code), shapes_only=True)
    assert report["findings"] == [], report["text"]
    assert "few [1, 2] tied True" in report["stdout"]
    assert [asked["how"] for asked in report["asked"]] == ["decision"]
    assert phase_of(report)["kinds"]["weights"] == big.nbytes


def phase_of(report: dict[str, Any]) -> dict[str, Any]:
    (phase,) = report["memory"]["cuda:0"]["phases"]
    assert isinstance(phase, dict)
    return phase


def test_the_weights_of_a_model_are_measured_by_their_files(tmp_path: Path) -> None:
    assert room_here.weights_of(str(tmp_path / "not there")) == 0
    (tmp_path / "part.bin").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    assert room_here.weights_of(str(tmp_path)) == 100
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    assert room_here.weights_of(str(tmp_path)) == 40


@contextmanager
def a_hub(files: dict[str, int]) -> Iterator[str]:
    """On loopback: it knows the files of one repository."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.startswith("/api/models/some/model/")
            siblings = [{"rfilename": name, "size": size} for name, size in files.items()]
            body = json.dumps({"id": "some/model", "siblings": siblings} if known else {}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_weights_that_would_be_fetched_are_measured_at_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    parts = {f"model-0000{part}-of-00002.safetensors": 70 << 30 for part in (1, 2)}
    others = {"config.json": 700, "original/consolidated.00.pth": 1 << 37, "pytorch_model.bin": 1 << 37}
    with a_hub(parts | others) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert room_here.weights_at_the_hub("some/model", "main") == 0  # offline: not asked
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert room_here.weights_at_the_hub("some/model", "main") == 140 << 30
        assert room_here.weights_at_the_hub("no/such", "main") == 0
        assert room_here.weights_at_the_hub("not a name: at all", "main") == 0
    assert room_here.weights_at_the_hub("some/model", "main") == 0  # nobody is there any more
    with a_hub(others) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert room_here.weights_at_the_hub("some/model", "main") == 1 << 37


@pytest.mark.parametrize("apart", [{}, {"/home": "/"}], ids=["in place", "overlay"])
def test_what_is_fetched_for_nothing_is_said(monkeypatch: pytest.MonkeyPatch, apart: dict[str, str]) -> None:
    monkeypatch.setattr(room_here, "weights_at_the_hub", lambda name, revision: 2 << 30)
    notes: list[str] = []
    settings = SimpleNamespace(apart=apart, launched=0)
    recorder = SimpleNamespace(write=lambda t, text: notes.append(text))
    rehearsed: Any = SimpleNamespace(settings=settings, recorder=recorder)
    room_here._look(rehearsed, "some/model", "main")
    assert [note.startswith("2.0 GiB of some/model were fetched") for note in notes] == [True] * bool(apart)


def test_a_machine_that_is_nearly_full_ends_a_rehearsal_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cpu:
        total_bytes, free_bytes = 1000, 20

    monkeypatch.setattr(room_here, "probe_cpu", Cpu)
    monkeypatch.setattr(room_here, "_held", lambda folder: 100)
    assert not room_here.Watch(tmp_path).seen()  # somebody else filled it
    monkeypatch.setattr(room_here, "_held", lambda folder: 900)
    assert room_here.Watch(tmp_path).seen()
    assert "filled the memory" in room_here.said(tmp_path)


def test_why_values_do_not_fit_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sees that it was said ends the process that says it."""
    real = Path.write_text

    def interrupted(path: Path, text: str) -> int:
        written = real(path, text[:1])
        assert room_here.said(tmp_path) == ""
        assert not room_here.Watch(tmp_path).seen()
        return written + real(path, text)

    monkeypatch.setattr(Path, "write_text", interrupted)
    room_here.say(tmp_path, "too little")
    assert room_here.said(tmp_path) == "too little"
    assert room_here.Watch(tmp_path).seen()


def test_of_a_config_the_weights_in_the_plans_formats_are_asked_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("trimtab.rehearse.process.rehearsal_holds", lambda *of: asked.append(of))
    config = SimpleNamespace(model=SimpleNamespace(name="a-model"))
    profile = SimpleNamespace(parameters=1000, four_bit=0)
    plan = SimpleNamespace(weight_precision="bf16", strategy="single", processes=1, starts_launcher=False)
    _leave_room_here(config, SimpleNamespace(plan=plan, profile=profile))  # type: ignore[arg-type]
    copies = SimpleNamespace(
        **{**vars(plan), "strategy": "data_parallel", "processes": 4, "starts_launcher": True}
    )
    _leave_room_here(config, SimpleNamespace(plan=copies, profile=profile))  # type: ignore[arg-type]
    packed = SimpleNamespace(parameters=1000, four_bit=800)
    _leave_room_here(config, SimpleNamespace(plan=plan, profile=packed))  # type: ignore[arg-type]
    assert asked[:2] == [("a-model", 2000), ("a-model", 8000)]
    assert 800 < asked[2][1] < 850


def test_what_a_process_of_a_launcher_refuses_is_known_to_the_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[BaseException] = []
    refused = RequestError("no tokenizer")
    process.rehearsal_ends_by(refused)  # nothing is rehearsed: nobody to tell
    monkeypatch.setattr(process, "_process", SimpleNamespace(failed=ends.append))
    process.rehearsal_ends_by(refused)
    assert isinstance(ends[0], SystemExit)
    assert ends[0].__context__ is refused


@pytest.mark.slow
def test_a_config_goes_by_shapes_before_anything_of_a_model_is_fetched(
    rehearse: Rehearse, repository: Path, tmp_path: Path
) -> None:
    large = {"hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 8}
    model = tmp_path / "bare"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | large | {"vocab_size": 64000}))
    words = (str(repository / "examples" / "sft.yaml"), f"model={model}", "device=cuda")
    report = rehearse(*words, gpus=1, memory_bytes=1 << 44)
    assert report["shapes_only"]
    assert "GiB of weights, and this machine" in report["notes"][0]
    assert (report["verdict"], report["findings"]) == ("unproven", [])
    assert report["memory"]["cuda:0"]["peak_bytes"] > 1 << 40


@pytest.mark.slow
def test_what_the_ranks_of_a_config_refuse_is_said_once_and_no_fault(
    repository: Path, tmp_path: Path
) -> None:
    model = model_folder(tmp_path, "none")
    words = [str(repository / "examples" / "sft.yaml"), f"model={model}", "device=cuda", "processes=2"]
    command = [sys.executable, "-m", "trimtab", "rehearse", "--gpus", "2", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("the folder has no tokenizer") == 1
    assert "The script ended itself" not in done.stdout


def test_what_surely_does_not_fit_is_known_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(room_here, "probe_cpu", lambda: SimpleNamespace(free_bytes=1 << 36))
    example = str(repository / "examples" / "sft.yaml")

    def why(model: object, *more: str, copies: int = 0) -> str:
        return room_here.known_before(("-m", "trimtab", "train", example, f"model={model}", *more), copies)

    stored = model_folder(tmp_path, "file")  # 4 TiB
    assert "has 4096.0 GiB of weights, and this machine" in why(stored)
    assert "in each of 8 ranks" in why(stored, copies=8)
    assert not why(stored, "model.quantize=nf4")
    assert not why("smollm2")
    bare = tmp_path / "bare"
    bare.mkdir()
    assert not why(bare)
    large = {"hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 8}
    (bare / "config.json").write_text(json.dumps({"text_config": large}))
    assert "has more than 2048.0 GiB of weights, and this machine" in why(bare)
    (bare / "config.json").write_text(json.dumps(large | {"num_hidden_layers": "8"}))
    assert not why(bare)
    (bare / "config.json").write_text("{")
    assert not why(bare)
    assert not why(stored, "no.such.key=1")
    assert not room_here.known_before(("train.py",), 1)


def test_nothing_is_started_for_what_surely_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(room_here, "probe_cpu", lambda: SimpleNamespace(free_bytes=1 << 36))
    begun: list[bool] = []

    def start(rank: Any) -> Any:
        begun.append(
            json.loads((Path(rank.environment[VARIABLE]) / "settings.json").read_text())["shapes_only"]
        )
        raise KeyboardInterrupt

    words = [str(repository / "examples" / "sft.yaml"), f"model={model_folder(tmp_path, 'file')}"]
    with pytest.raises(KeyboardInterrupt):
        run.rehearse(words, Settings(), start=start)
    assert begun == [True]
