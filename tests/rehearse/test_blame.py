"""Whose an error is: the program's when that was proven, ours or this machine's otherwise, and nothing is claimed."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.diagnose import rewrite
from trimtab.rehearse import blame, errors, lacking, old_code, process, tracebacks, unreachable
from trimtab.rehearse.errors import looked_at
from trimtab.rehearse.session import Settings
from trimtab.virtual.context import virtual_gpus

Rehearse = Callable[..., dict[str, Any]]
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def error_of(program: str, folder: Path) -> Exception:
    """The error that ends a program on two virtual GPUs."""
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text(HEAD + textwrap.dedent(program))
    with virtual_gpus(2), pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    return caught.value


WHOSE = {
    "a shape, in a layer": ("nn.Linear(4, 2).cuda()(torch.ones(3, 5, device='cuda'))", "proven"),
    "a shape, in sixteen bits": ("a = torch.ones(4, 5).cuda().half()\na @ a", "proven"),
    "a view that strides forbid": ("torch.ones(4, 6).cuda().t().view(24)", "proven"),
    "a shape, under vmap": (
        "torch.func.vmap(torch.dot)(torch.ones(3, 4).cuda(), torch.ones(3, 5).cuda())",
        "proven",
    ),
    "a leaf that is changed in place": ("nn.Parameter(torch.ones(3).cuda()).add_(1)", "proven"),
    "a tensor of inference mode in a graph": (
        "with torch.inference_mode():\n    x = torch.ones(3, 4).cuda() * 2\nnn.Linear(4, 2).cuda()(x)",
        "proven",
    ),
    "torch's own Python": ("F.interpolate(torch.ones(3).cuda(), size=3)", "proven"),
    "a type that no device takes": ("torch.softmax(torch.arange(4).cuda(), 0)", "proven"),
    "a tensor that stayed on the CPU": ("torch.linalg.inv(torch.eye(4).half())", "proven"),
    "no such device": ("torch.ones(2).cuda().to('gpu')", "proven"),
    "Python alone": ("{'a': torch.ones(2).cuda()}['b']", "python"),
    "an assert on values": ("assert torch.ones(2).cuda().sum().item() == 3", "python"),
    "a device, as CUDA says it": ("torch.ones(2).cuda() + torch.ones(2)", "simulated"),
    "an index, as CUDA says it": ("nn.Embedding(4, 2).cuda()(torch.tensor([5]).cuda())", "simulated"),
    "a GPU that is not there": ("torch.ones(2).to('cuda:7')", "simulated"),
    "devices that C++ compares": (
        "nn.LSTM(4, 4).cuda()(torch.ones(2, 1, 4).cuda(), (torch.ones(1, 1, 4), torch.ones(1, 1, 4)))",
        "simulated",
    ),
    "a type that the CPU lacks": ("x = torch.ones(2).cuda().to(torch.float8_e4m3fn)\nx + x", "unproven"),
    "a symbol of a CUDA build": ("torch._C._cuda_of_another_build()", "unproven"),
    "a package for CUDA": ("import flash_attn_2_cuda", "unproven"),
    "the memory of this machine": ("bytearray(1 << 55)", "unproven"),
    "not simulated": ("torch.cuda.CUDAGraph()", "unproven"),
    "a mistake of ours": (
        "from unittest import mock\nx = torch.ones(2).cuda()\n"
        "with mock.patch('trimtab.virtual.dispatch.wrap', None):\n    torch.add(x, 2)",
        "unproven",
    ),
}


@pytest.mark.parametrize(("program", "whose"), WHOSE.values(), ids=WHOSE)
def test_whose_an_error_is(program: str, whose: str, tmp_path: Path) -> None:
    error = error_of(program, tmp_path)
    judged = blame.judge(error)
    assert judged.whose == whose, (judged, error)
    assert judged.why or whose not in ("unproven", "open")


def test_what_was_given_is_not_touched_by_a_trial(tmp_path: Path) -> None:
    program = """
        given = torch.ones(3, device="cuda")
        state = torch.random.get_rng_state()
        torch.where(given.mul_(2) > 0, given, torch.ones(4, device="cuda"))
        """
    error = error_of(program, tmp_path)
    space = traceback.walk_tb(error.__traceback__)
    mine = next(frame.f_globals for frame, _ in space if "given" in frame.f_globals)
    assert blame.judge(error).whose == "proven"
    assert mine["given"].tolist() == [2.0, 2.0, 2.0]
    assert (mine["torch"].random.get_rng_state() == mine["state"]).all()


def test_an_error_that_was_wrapped_is_told_at_the_line_that_failed(tmp_path: Path) -> None:
    program = """
        def fit():
            try:
                nn.Linear(4, 2).cuda()(torch.ones(3, 5, device="cuda"))
            except RuntimeError as error:
                raise ValueError("the training failed") from error
        fit()
        """
    finding, unproven = looked_at(error_of(program, tmp_path))
    assert finding is not None
    assert (finding.where.line if finding.where else 0, unproven) == (7, "")
    lacks = program.replace(
        'nn.Linear(4, 2).cuda()(torch.ones(3, 5, device="cuda"))', "torch._C._cuda_no_such()"
    )
    finding, unproven = looked_at(error_of(lacks.replace("RuntimeError", "AttributeError"), tmp_path))
    assert finding is None
    assert "_cuda_no_such is there only in a build with CUDA" in unproven


def test_a_second_way_that_fails_is_an_error_of_its_own(tmp_path: Path) -> None:
    program = """
        def other_way():
            return torch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()
        try:
            open("/no/such/file")
        except FileNotFoundError:
            other_way()
        """
    finding, unproven = looked_at(error_of(program, tmp_path))
    assert finding is not None
    assert (finding.severity, unproven) == ("fault", "")


UNREACHABLE = {
    "open('/no/such/rows.jsonl')": "/no/such/rows.jsonl",
    "torch.load('/no/such/model.pt')": "/no/such/model.pt",
    "import urllib.request as u\nu.urlopen('http://127.0.0.1:9/rows.txt')": "http://127.0.0.1:9/rows.txt",
    "from huggingface_hub import hf_hub_download\nhf_hub_download('no/such', 'x', local_files_only=True)": "no/such",
    "from huggingface_hub import hf_hub_download\nhf_hub_download('/no/such/folder', 'x')": "/no/such/folder",
    "raise RuntimeError('Tried https://a-datasets.s3.x.com/mnist/, got: Name or service not known')": (
        "https://a-datasets.s3.x.com/mnist/ beforehand"
    ),
    "raise RuntimeError('Dataset not found or corrupted. You can use download=True to download it')": "",
}


@pytest.mark.parametrize(("program", "asked"), UNREACHABLE.items())
def test_data_that_cannot_be_reached(program: str, asked: str, tmp_path: Path) -> None:
    finding, unproven = looked_at(error_of(program, tmp_path))
    assert finding is not None
    assert (finding.kind, finding.severity) == ("data-unreachable", "warning")
    assert asked.partition(" ")[0] in finding.message
    assert asked in finding.fix
    assert "data could not be reached" in unproven


@pytest.mark.parametrize(
    "program",
    [
        "open('/no/such/folder/log.txt', 'w')",
        "path = '/no/best.pt'\nif torch.cuda.device_count() > 9:\n    torch.save({}, path)\ntorch.load(path)",
        "import subprocess\nsubprocess.run(['/no/such/command'])",
    ],
)
def test_a_file_of_the_program_s_own_is_its_own_affair(program: str, tmp_path: Path) -> None:
    assert not unreachable.is_unreachable(error_of(program, tmp_path))


def test_what_gloo_lacks_is_not_the_program_s_fault() -> None:
    assert lacking.of_the_transport(RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo"), False)
    assert lacking.of_the_transport(RuntimeError("Unsupported data type for this"), True)
    assert lacking.of_the_build(RuntimeError("libmpi.so.12: cannot open shared object file: No such file"))
    assert lacking.of_the_build(
        OSError("Could not load this library: /site-packages/torchtext/lib/libtorchtext.so")
    )
    assert lacking.of_the_build(
        ImportError("/site-packages/a/_b.cpython-311.so: undefined symbol: _ZN5torch6detail")
    )
    assert not lacking.of_the_build(OSError("cannot read weights.so: a folder"))
    assert not lacking.of_the_transport(RuntimeError("Unsupported data type for this"), False)


def test_our_frames_are_left_out_of_tracebacks(tmp_path: Path) -> None:
    error = error_of("F.cross_entropy(torch.ones(4, 3).cuda(), torch.zeros(5).long().cuda())", tmp_path)
    files = [
        Path(frame.filename).name
        for frame in tracebacks.shown(list(traceback.extract_tb(error.__traceback__)))
    ]
    assert files == [Path(__file__).name, "program0.py", "functional.py"]


ENDS = {
    "unreachable": "open('/no/such/rows.jsonl')",
    "caught, and given up": "import sys\ntry:\n    open('/no/rows')\nexcept OSError:\n    sys.exit('no data')",
    "of a worker": "for row in torch.utils.data.DataLoader(Rows(), num_workers=1):\n    pass",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "a killed rank": "if __name__ == '__main__':\n    torch.multiprocessing.spawn(killed, nprocs=1)",
    "on no GPU": "device = torch.device('mps' if torch.backends.mps.is_available() else 'cpu')",
}
SAID = {
    "killed": "--shapes-only",
    "a killed rank": "--shapes-only",
    "on no GPU": "nothing ran on a GPU: no tensor was ever put on one (the device is chosen at program.py:13",
}


@pytest.mark.parametrize("way", ENDS)
def test_ends_that_prove_nothing(way: str, rehearse_warm: Rehearse, tmp_path: Path) -> None:
    head = """
        import torch

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, index):
                return torch.load(f"/no/such/{index}.pt")

        def killed(rank):
            import os
            os.kill(os.getpid(), 9)
        """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(head) + ENDS[way])
    report = rehearse_warm(str(path))
    assert (report["verdict"], report["exit"]) == ("unproven", 3), report["text"]
    assert SAID.get(way, "data could not be reached") in " ".join(report["notes"]), report["notes"]
    kinds = [(finding["kind"], finding["severity"]) for finding in report["findings"]]
    assert kinds == ([("data-unreachable", "warning")] if way not in SAID else []), report["text"]
    assert "trimtab" not in report["stderr"]


QUIET = """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = DistributedDataParallel(torch.compile(torch.nn.Linear(4, 4).cuda()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(12):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(model._get_ddp_logging_data()["world_size"])
    dist.destroy_process_group()
    """


def test_a_rehearsal_prints_no_warning_of_its_own(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(QUIET))
    report = rehearse_warm(str(path), ranks=2)
    assert report["verdict"] == "clean", report["text"]
    # Both write to one file: a line of one may come before the other's is ended.
    assert ("".join(report["stdout"].split()), report["stderr"]) == ("22", "")


def test_a_wrong_config_is_a_wrong_request(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("recipe: sft\nlerning_rate: 3\n")
    command = [sys.executable, "-m", "trimtab", "rehearse", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("did you mean training.learning_rate?") == 1


def test_a_package_that_this_machine_lacks_is_no_fault_and_a_misspelt_module_is(tmp_path: Path) -> None:
    (tmp_path / "layers_of_mine.py").write_text("")
    (tmp_path / "runs").mkdir()  # a folder without Python in it is no package
    lacking = {
        "import runs_of_nobody": "runs_of_nobody",
        "import hydra_of_nobody.core": "hydra_of_nobody",
        "try:\n    import nobody\nexcept ImportError as error:\n    raise SystemExit(1) from error": "nobody",
        "raise ImportError('Using this needs nobody: pip install -U nobody-there')": "nobody_there",
    }
    for program, name in lacking.items():
        finding, unproven = looked_at(_ended(program, tmp_path))
        assert finding is not None, program
        assert (finding.kind, finding.severity) == ("other-error", "warning")
        assert f"no package {name}, which program" in finding.message
        assert "pip install" in finding.fix
        assert name in unproven
    faults = {
        "import layers_of_mien": "import layers_of_mine",
        "import torch.no_such_part": "torch is there",
        "from torch import no_such_name": "",
        "try:\n    import nobody\nexcept ImportError:\n    pass\nnot_defined": "",
        "raise ImportError('pip install torch')": "",
    }
    for program, fix in faults.items():
        finding, unproven = looked_at(_ended(program, tmp_path))
        assert finding is not None, program
        assert finding.severity == "fault", program
        assert not unproven
        assert fix in finding.fix, finding.fix


@pytest.mark.parametrize("written", ["pyx", "setup"])
def test_a_compiled_part_that_was_not_built_is_no_fault(tmp_path: Path, written: str) -> None:
    beside = tmp_path / "aligned"
    beside.mkdir()
    (beside / "setup.py").write_text(
        "from setuptools import Extension, setup\nsetup(ext_modules=[Extension('core', ['s.c'])])"
        if written == "setup"
        else "from Cython.Build import cythonize\ncythonize('core.pyx')"
    )
    if written == "pyx":
        (beside / "core.pyx").write_text("")
    finding, unproven = looked_at(_ended("from aligned_parts.core import path", tmp_path))
    assert finding is not None
    assert (finding.severity, finding.where and finding.where.line) == ("warning", 1)
    assert f"cd {beside} && python setup.py build_ext --inplace" in finding.fix
    assert "is not built on this machine" in unproven


def _ended(program: str, folder: Path) -> BaseException:
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text(program)
    with virtual_gpus(1), pytest.raises((Exception, SystemExit)) as caught:
        exec(compile(program, str(path), "exec"), {"__name__": "__main__"})
    return caught.value


REFUSED = {
    "wrapped by a library": "as error:\n    raise RuntimeError('stage 0') from error",
    "met by another way": ":\n    other_way()",
    "one of a group": "as error:\n    raise ExceptionGroup('tasks', [ValueError(1), error])",
    "hidden": ":\n    raise RuntimeError('no') from None",
}


@pytest.mark.parametrize("program", REFUSED.values(), ids=REFUSED)
def test_an_error_that_comes_of_what_is_not_simulated_proves_nothing(program: str, tmp_path: Path) -> None:
    head = "def refuse():\n    torch.cuda.CUDAGraph()\ndef other_way():\n    [][1]\n"
    handled = f"try:\n    refuse()\nexcept NotImplementedError {program}"
    finding, unproven = looked_at(error_of(head + handled, tmp_path))
    assert finding is None
    assert "CUDAGraph is not simulated" in unproven


def test_what_was_refused_and_caught_is_told_and_leaves_nothing_clean(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    caught = "try:\n    torch.cuda.CUDAGraph()\nexcept NotImplementedError:\n    graph = None\n"
    path = tmp_path / "train.py"
    for last, verdict in {
        "": "unproven",
        "graph.replay()": "unproven",
        "torch.ones(2).cuda() + torch.ones(2)": "fault",
    }.items():
        path.write_text(f"{HEAD}x = torch.ones(2, device='cuda')\n{caught}{last}\n")
        report = rehearse_warm(str(path))
        assert report["verdict"] == verdict, report["text"]
        assert any("CUDAGraph" in note and "train.py:6" in note for note in report["notes"])


def test_the_steps_asked_for_may_have_been_made_on_another_worker(tmp_path: Path) -> None:
    Settings().save(tmp_path)
    here = process.Process(tmp_path)
    by_rpc = RuntimeError(
        "On WorkerInfo(id=2, name=trainer2):\nRuntimeError('StopRehearsal: 2 optimizer steps made"
    )
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    assert errors.stopped_as_asked(process.StopRehearsal("2 optimizer steps made"), here)
    assert errors.stopped_as_asked(by_rpc, here)
    assert not errors.stopped_as_asked(gone, here)
    (tmp_path / "records-1.jsonl").write_text('{"t": "stopped"}\n')
    assert errors.stopped_as_asked(gone, here)
    assert not errors.stopped_as_asked(ValueError("a mistake of its own"), here)


def test_code_of_another_age_is_told_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text("x = images.cuda(async=True)\ny = labels.cuda(async=True)\n")
    with pytest.raises(SyntaxError) as caught:
        compile(script.read_text(), str(script), "exec")
    finding, _ = looked_at(caught.value)
    assert finding is not None
    assert "x = images.cuda(non_blocking=True) (and at 1 more places)" in finding.fix
    assert "async" not in rewrite.applied(script.read_text(), finding.edits)
    (tmp_path / "requirements.txt").write_text("numpy>=1.19\ntorch==1.4.0\n")
    program = "from torch.nn.functional import _softmax_of_old"
    found, _ = looked_at(error_of(program, tmp_path))
    assert found is not None
    assert re.search(
        r"torch 2\S*, which is installed here, has no _softmax_of_old in torch\.nn\.functional", found.fix
    )
    assert "requirements.txt asks for torch==1.4.0" in found.fix
    for program, shown, line in [
        ("import numpy as np\nbest = -np.Inf", "best = -np.inf", "best = -np.inf"),
        ("import numpy as np\nx = np.int(3.5) + 1", "x = int(3.5) + 1", "x = int(3.5) + 1"),
        ("rows = iter(torch.randn(2))\nx = rows.next()", "next(rows)", "x = next(rows)"),
        (
            "x = torch.eye(4).cuda()\nx[:, :2].view(8).sum()",
            "x[:, :2].reshape(8)",
            "x[:, :2].reshape(8).sum()",
        ),
    ]:
        gone, _ = looked_at(error_of(program, tmp_path))
        assert gone is not None
        assert gone.fix.endswith(shown), gone.fix
        assert rewrite.applied(Path(gone.edits[0].file).read_text(), gone.edits).splitlines()[-1] == line
    late = AttributeError("module transformers has no attribute OldConfig")
    assert "has no OldConfig in transformers" in old_code.fix_for(late, str(script))[0]
    lost, _ = looked_at(error_of("torch.optim.Adam.add_argparse_args()", tmp_path))
    assert lost is not None
    assert (
        "has no add_argparse_args in torch.optim.adam.Adam; requirements.txt asks for torch==1.4.0"
        in lost.fix
    )
    typo, _ = looked_at(error_of("torch.nn.functional.cross_entropie", tmp_path))
    assert typo is not None
    assert (
        "has no cross_entropie in torch.nn.functional (the nearest name there is cross_entropy)" in typo.fix
    )
