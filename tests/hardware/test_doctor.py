"""The doctor: what would bite is found, nothing secret is shown, and a broken installation is survived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trimtab.hardware import Accelerator, Cpu, Hardware, Launcher, accelerators
from trimtab.hardware.doctor import Report, examine
from trimtab.hardware.environment import check_environment
from trimtab.hardware.findings import Remark, scrub, shown_value
from trimtab.hardware.machine import BUILTIN_PACKAGE, check_cpu, check_disk, check_gpus
from trimtab.hardware.nvidia import NvidiaDriver, find_driver
from trimtab.hardware.packages import (
    Package,
    check_neighbours,
    check_packages,
    check_python,
    installed_version,
    known_packages,
)

Doctor = Callable[..., subprocess.CompletedProcess[str]]

NO_DRIVER = NvidiaDriver()
DRIVER = NvidiaDriver(version="580.159.04", gpus=("NVIDIA H200", "NVIDIA H200"))


def machine(gpus: str = "", *, cuda: str | None = None, cores: int = 16, **more: object) -> Hardware:
    """A machine as `probe` would describe it, with the GPUs of the catalogue."""
    return Hardware(
        cpu=Cpu(model="test", cores=cores, total_bytes=2**36, free_bytes=2**35, bf16=False),
        accelerators=accelerators(gpus) if gpus else (),
        torch_version="2.13.0",
        cuda_build=cuda,
        **more,  # type: ignore[arg-type]
    )


CPU_ONLY = machine()
TWO_GPUS = machine("2xH200", cuda="13.0")


def settings(
    env: Mapping[str, str],
    hardware: Hardware = CPU_ONLY,
    driver: NvidiaDriver = NO_DRIVER,
    interfaces: tuple[str, ...] = ("lo", "eth0"),
) -> dict[str, str]:
    """Level by topic. A folder without an Accelerate file keeps this machine's own out of the answer."""
    found = check_environment({"HF_HOME": "/nonexistent"} | dict(env), hardware, driver, interfaces)
    return {finding.topic: finding.level for finding in found}


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without anything a doctor would remark on."""
    keep = (
        "PATH",
        "PYTHONPATH",
        "HOME",
        "LANG",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "SYSTEMROOT",
        "USER",
    )
    return {name: os.environ[name] for name in keep if name in os.environ} | more


@pytest.fixture
def run_doctor(trimtab: Doctor, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """`trimtab doctor` in an environment without anything it would remark on, and what it is given."""
    for name in set(os.environ) - set(clean_env()):
        monkeypatch.delenv(name)
    return lambda *arguments, **env: trimtab("doctor", *arguments, **env)


def write_distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    """A package's metadata, as an installer writes it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


# The report as a whole


@pytest.fixture(scope="module")
def report() -> Report:
    return examine(clean_env())


def test_report_covers_what_a_bug_report_needs(report: Report) -> None:
    topics = {finding.topic for finding in report.findings}
    assert {"trimtab", "python", "torch", "transformers", "peft", "trl", "cpu", "launcher", "cache"} <= topics
    assert {"s3fs", "triton", "liger-kernel", "flash-attn", "bitsandbytes", "vllm", "ollama"} <= topics
    assert len([f for f in report.findings if f.topic == "torch"]) == 1


def test_json_has_its_documented_keys_and_can_be_written(report: Report) -> None:
    data = json.loads(json.dumps(report.as_dict()))
    assert set(data) == {
        "accelerators",
        "builtin_model",
        "cache",
        "cpu",
        "environment",
        "findings",
        "launcher",
        "nvidia_driver",
        "packages",
        "platform",
        "python",
        "tools",
        "torch",
        "trimtab",
        "verdict",
    }
    import torch

    assert data["torch"] == {"version": torch.__version__, "cuda_build": torch.version.cuda, "error": ""}
    assert set(data["findings"][0]) == {"level", "topic", "found", "change"}
    assert data["verdict"] == ("bites" if report.bites else "fine")


def test_text_is_one_aligned_line_each(report: Report) -> None:
    *lines, last = report.lines()
    assert len(lines) == len(report.findings)
    assert all("\n" not in line and line[0] in "✓-!✗" and line[1] == " " for line in lines)
    columns = {line.index(scrub(f.found)) for line, f in zip(lines, report.findings, strict=True)}
    assert len(columns) == 1
    assert "would bite" in last


def test_the_models_room_means_the_same_package() -> None:
    from trimtab.models import builtin

    assert BUILTIN_PACKAGE == builtin.PACKAGE


# The verb


def test_exit_code_tells_whether_something_bites(run_doctor: Doctor) -> None:
    stale = run_doctor("--json", RANK="0", WORLD_SIZE="2", MASTER_ADDR="secret-host")
    data = json.loads(stale.stdout)
    assert stale.returncode == 1
    assert data["verdict"] == "bites"
    assert data["launcher"]["stale"] == ["RANK", "WORLD_SIZE", "MASTER_ADDR"]
    assert "secret-host" not in stale.stdout
    bite = next(f for f in data["findings"] if f["topic"] == "launcher")
    assert bite["level"] == "bite"
    assert "unset RANK WORLD_SIZE MASTER_ADDR" in bite["change"]


def test_text_and_json_and_exit_code_agree(run_doctor: Doctor) -> None:
    text, data = run_doctor(), run_doctor("--json")
    assert text.returncode == data.returncode == (1 if json.loads(data.stdout)["verdict"] == "bites" else 0)
    assert ("nothing here would bite" in text.stdout) == (text.returncode == 0)
    assert ("✗" in text.stdout) == (text.returncode == 1)


def test_no_secret_in_either_form(run_doctor: Doctor) -> None:
    secrets = {
        "HF_TOKEN": "hf_abcdefghijklmnopqrst",
        "AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "AWS_ENDPOINT_URL": "https://store.internal.example",
        "HF_ENDPOINT": "https://alice:hunter2@mirror.example/?token=topsecret",
        "ACCELERATE_MIXED_PRECISION": "hf_zyxwvutsrqponmlk",
        "TRIMTAB_LAUNCHER": "sk-abcdefghijklmnop",
        "CUDA_API_PASSWORD": "letmein",
    }
    for arguments in ([], ["--json"]):
        answer = run_doctor(*arguments, **secrets)
        assert answer.returncode == 1, answer.stderr
        shown = answer.stdout + answer.stderr
        for secret in (*secrets.values(), "hunter2", "topsecret", "alice", "store.internal"):
            assert secret not in shown, f"{secret} shown in {arguments}"
    assert json.loads(answer.stdout)["environment"]["HF_TOKEN"] == "(set, not shown)"


def test_malformed_launcher_variables_are_a_finding(run_doctor: Doctor) -> None:
    answer = run_doctor(TORCHELASTIC_RUN_ID="x", RANK="abc", WORLD_SIZE="2")
    assert answer.returncode == 1
    assert "RANK=abc" in answer.stdout
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("torch", "raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("torch", "raise ImportError('DLL load failed')", "DLL load failed"),
        ("torch", "raise RuntimeError('operator already registered')", "operator already registered"),
        ("torch", "answer = 42", "is not PyTorch"),
        (
            "torch",
            "__version__ = '2.13.0'\nclass cuda:\n  def is_available(): raise RuntimeError('CUDA unknown error')",
            "fails when it looks for GPUs: CUDA unknown error",
        ),
        ("psutil", "raise ImportError('no psutil', name='psutil')", "psutil does not import"),
        ("packaging", "raise ImportError('no packaging', name='packaging')", "versions were not compared"),
    ],
)
def test_a_broken_package_is_a_finding(tmp_path: Path, module: str, text: str, expected: str) -> None:
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()])
    answer = subprocess.run(
        [sys.executable, "-m", "trimtab", "doctor"],
        capture_output=True,
        text=True,
        env=clean_env(PYTHONPATH=path),
        timeout=120,
        check=False,
    )
    assert answer.returncode == 1, answer.stderr
    line = next(line for line in answer.stdout.splitlines() if expected in line)
    assert line.startswith("✗")
    assert "✓ cpu" in answer.stdout or module == "psutil"


# Packages


def test_this_projects_own_bounds_are_read() -> None:
    packages = {package.name.lower(): package for package in known_packages()}
    assert packages["torch"].required
    assert packages["torch"].needs.startswith(">=2.")
    assert packages["transformers"].needs.startswith(">=5.")
    assert not packages["vllm"].required
    assert packages["s3fs"].needs.startswith(">=")
    assert "pytest" not in packages


@pytest.mark.parametrize(
    ("version", "required", "level"),
    [
        ("2.13.0+cpu", True, "ok"),
        ("2.11.0.dev20260101", True, "bite"),
        ("2.12.0.dev20260101+cu130", True, "ok"),
        ("2.10.1", True, "bite"),
        (None, True, "bite"),
        ("?", True, "bite"),
        ("2.10.1", False, "note"),
        (None, False, "absent"),
    ],
)
def test_a_packages_version(version: str | None, required: bool, level: str) -> None:
    package = Package(name="torch", version=version, needs=">=2.11", required=required)
    (finding,) = check_packages([package])
    assert finding.level == level
    assert bool(finding.change) == (level in ("bite", "note"))


def test_a_required_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "demo-project", "1.0", "surely-not-installed>=3", 'torch>=99 ; extra == "x"')
    monkeypatch.syspath_prepend(tmp_path)
    packages = [package for package in known_packages("demo-project") if package.required]
    assert [package.name for package in packages] == ["surely-not-installed"]
    (finding,) = check_packages(packages)
    assert finding == Remark(
        "bite", "surely-not-installed", "not installed; needs >=3", "pip install 'surely-not-installed>=3'"
    )


def test_this_python_will_do() -> None:
    assert check_python().level == "ok"


def test_torchvision_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "torchvision", "0.20.0", "numpy", "torch==2.5.0", 'scipy ; extra == "x"')
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = [f for f in check_neighbours() if f.topic == "torchvision"]
    assert finding.level == "bite"
    assert "torch==2.5.0" in finding.found
    assert str(installed_version("torch")) in finding.found


def test_torchaudio_of_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "torch", "2.13.0+cu130")
    write_distribution(tmp_path, "torchaudio", "2.13.0+cpu", "torch==2.13.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert [f.found for f in check_neighbours() if f.topic == "torchaudio"] == [
        "2.13.0+cpu is built for cpu, and torch 2.13.0+cu130 for cu130"
    ]


def test_metadata_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "xformers", "0.1", "torch (>=2.*,, nonsense")
    monkeypatch.syspath_prepend(tmp_path)
    assert [f.level for f in check_neighbours() if f.topic == "xformers"] == ["note"]


# Settings


def test_a_clean_environment_has_nothing_to_say() -> None:
    assert settings({}) == {}
    assert settings({}, TWO_GPUS, DRIVER) == {}


@pytest.mark.parametrize(
    ("value", "hardware", "driver", "level"),
    [
        ("0", CPU_ONLY, NO_DRIVER, "bite"),
        ("", CPU_ONLY, NO_DRIVER, "note"),
        ("", machine(cuda="13.0"), DRIVER, "bite"),
        ("-1", machine(cuda="13.0"), DRIVER, "bite"),
        ("", machine(cuda="13.0"), NO_DRIVER, "note"),
        ("0,1", TWO_GPUS, DRIVER, "ok"),
        ("0,7", machine("1", cuda="13.0"), DRIVER, "bite"),
        ("7", machine(cuda="13.0"), DRIVER, "bite"),
        ("GPU-d514e13a,GPU-aaaaaaaa", TWO_GPUS, DRIVER, "ok"),
    ],
)
def test_cuda_visible_devices(value: str, hardware: Hardware, driver: NvidiaDriver, level: str) -> None:
    assert settings({"CUDA_VISIBLE_DEVICES": value}, hardware, driver) == {"CUDA_VISIBLE_DEVICES": level}


@pytest.mark.parametrize(
    ("name", "value", "on_cpu", "on_gpus"),
    [
        ("HF_HUB_OFFLINE", "1", "note", "note"),
        ("HF_HUB_OFFLINE", "0", None, None),
        ("TRANSFORMERS_OFFLINE", "true", "note", "note"),
        ("OMP_NUM_THREADS", "1", "bite", "note"),
        ("OMP_NUM_THREADS", "8", None, None),
        ("ACCELERATE_USE_CPU", "true", "note", "bite"),
        ("ACCELERATE_USE_CPU", "False", None, None),
        ("ACCELERATE_TORCH_DEVICE", "cuda:3", "bite", "bite"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", "bite", "bite"),
        ("ACCELERATE_MIXED_PRECISION", "no", None, None),
        ("ACCELERATE_USE_FSDP", "true", "bite", "bite"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", None, None),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "bite", "bite"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", None, None),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "bite", "bite"),
        ("ACCELERATE_LOG_LEVEL", "info", None, None),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "note", "note"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", None, None),
        ("CUDA_LAUNCH_BLOCKING", "1", "note", "bite"),
        ("CUDA_LAUNCH_BLOCKING", "0", None, None),
        ("NCCL_P2P_DISABLE", "1", "note", "note"),
        ("NCCL_DEBUG", "INFO", "note", "note"),
        ("NCCL_DEBUG", "WARN", None, None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "note", "bite"),
        ("NCCL_SOCKET_IFNAME", "eth", None, None),
        ("NCCL_SOCKET_IFNAME", "=eth", "bite", "bite"),
        ("NCCL_SOCKET_IFNAME", "^docker", None, None),
        ("NCCL_SOCKET_IFNAME", "ib0", "bite", "bite"),
        ("GLOO_SOCKET_IFNAME", "eth0", None, None),
        ("GLOO_SOCKET_IFNAME", "eth", "bite", "bite"),
        ("TRANSFORMERS_CACHE", "/x", "note", "note"),
        ("PYTORCH_ENABLE_MPS_FALLBACK", "1", None, None),
    ],
)
def test_settings(name: str, value: str, on_cpu: str | None, on_gpus: str | None) -> None:
    assert settings({name: value}) == ({name: on_cpu} if on_cpu else {})
    assert settings({name: value}, TWO_GPUS, DRIVER) == ({name: on_gpus} if on_gpus else {})


def test_one_thread_is_fine_where_cores_are_few_or_processes_many() -> None:
    assert settings({"OMP_NUM_THREADS": "1"}, machine(cores=2)) == {}
    ranked = machine(launcher=Launcher(name="torchrun", world_size=8))
    assert settings({"OMP_NUM_THREADS": "1"}, ranked) == {"OMP_NUM_THREADS": "note"}


def test_mps_fallback_matters_on_a_mac() -> None:
    mps = Accelerator(name="mps", model="Apple arm64", total_bytes=2**34, free_bytes=2**34, bf16=True)
    hardware = Hardware(cpu=CPU_ONLY.cpu, accelerators=(mps,), torch_version="2.13.0")
    assert settings({"PYTORCH_ENABLE_MPS_FALLBACK": "1"}, hardware) == {"PYTORCH_ENABLE_MPS_FALLBACK": "note"}


def test_accelerates_default_file(tmp_path: Path) -> None:
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n"
        "fsdp_config:\n  mixed_precision: nested\nmain_process_ip: 10.1.2.3\n",
        encoding="utf-8",
    )
    (finding,) = check_environment({"HF_HOME": str(tmp_path)}, CPU_ONLY, NO_DRIVER)
    assert finding.level == "note"
    assert "distributed_type: MULTI_GPU, num_processes: 8" in finding.found
    assert "nested" not in finding.found
    assert "10.1.2.3" not in finding.found


# The machine


def gpu_findings(hardware: Hardware, driver: NvidiaDriver, *said: str, **env: str) -> list[Remark]:
    return [f for f in check_gpus(env, hardware, driver, list(said)) if not f.topic.startswith("cuda:")]


def test_a_gpu_that_this_torch_cannot_use() -> None:
    (finding,) = gpu_findings(CPU_ONLY, DRIVER)
    assert finding.level == "bite"
    assert "a GPU is in this machine but this torch cannot use it" in finding.found


def test_a_driver_that_is_too_old_for_torch() -> None:
    said = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    (finding,) = gpu_findings(machine(cuda="13.0"), DRIVER, said)
    assert finding.level == "bite"
    assert "too old" in finding.found


def test_a_gpu_that_this_build_was_not_made_for() -> None:
    said = "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with this installation."
    (finding,) = gpu_findings(machine("RTX5090", cuda="12.4"), DRIVER, said)
    assert (finding.level, finding.found) == ("bite", said)


@pytest.mark.parametrize("value", ["", "7"])
def test_gpus_that_a_setting_hides_are_reported_with_the_setting(value: str) -> None:
    (finding,) = gpu_findings(machine(cuda="13.0"), DRIVER, CUDA_VISIBLE_DEVICES=value)
    assert finding.level == "absent"
    (finding,) = gpu_findings(machine(cuda="13.0"), DRIVER)
    assert finding.level == "bite"


def test_no_gpu_is_no_fault() -> None:
    assert [f.level for f in gpu_findings(CPU_ONLY, NO_DRIVER)] == ["absent"]
    assert [f.level for f in gpu_findings(machine(cuda="13.0"), NO_DRIVER)] == ["note"]
    assert gpu_findings(TWO_GPUS, DRIVER) == []


def test_other_warnings_of_torch_are_passed_on() -> None:
    found = gpu_findings(CPU_ONLY, NO_DRIVER, "Failed to initialize NumPy: No module named 'numpy'")
    assert ("note", "torch") in [(f.level, f.topic) for f in found]


def test_a_driver_that_does_not_answer() -> None:
    broken = NvidiaDriver(version="580.1", error="Failed to initialize NVML: Driver/library version mismatch")
    levels = {f.topic: f.level for f in gpu_findings(machine(cuda="13.0"), broken)}
    assert levels["nvidia driver"] == "bite"
    # The program without a driver, as some container images carry it.
    assert gpu_findings(CPU_ONLY, NvidiaDriver(error="couldn't communicate"))[0].level == "note"


def test_a_gpu_in_use_is_remarked_on() -> None:
    gpu = Accelerator(name="cuda:0", model="NVIDIA H200", total_bytes=100, free_bytes=20, bf16=True)
    hardware = Hardware(cpu=CPU_ONLY.cpu, accelerators=(gpu,), torch_version="2.13.0", cuda_build="13.0")
    (finding,) = check_gpus({}, hardware, DRIVER, [])
    assert (finding.level, finding.topic) == ("note", "cuda:0")


def test_the_driver_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 15.3.0 (GCC)\n",
        encoding="utf-8",
    )
    assert find_driver(file) == NvidiaDriver(version="580.159.04")
    assert find_driver(tmp_path / "missing") == NvidiaDriver()


def test_cpu_line() -> None:
    assert check_cpu(CPU_ONLY.cpu).level == "ok"
    assert "16 cores" in check_cpu(CPU_ONLY.cpu).found


def test_cache_folder(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "not" / "yet").level in ("ok", "note")
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert check_disk(tmp_path / "file" / "below").level == "bite"
    assert not (tmp_path / "not").exists()


# What may be shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/work/x.py", "~/work/x.py"),
        ("at /Users/bob: gone", "at ~: gone"),
        (r"C:\Users\carol\x", r"~\x"),
        ("/mnt/home/alice", "/mnt/home/alice"),
        ("https://me:pw@host/x", "https://(not shown)@host/x"),
        ("https://me:p@ss/word@host/x", "https://(not shown)@host/x"),
        ("s3://b?X-Amz-Signature=abc&n=1", "s3://b?X-Amz-Signature=(not shown)&n=1"),
        ("token hf_abcdefghijklmnop here", "token (not shown) here"),
        ("two\n lines", "two lines"),
    ],
)
def test_scrub(text: str, shown: str) -> None:
    assert scrub(text) == shown


def test_scrub_knows_this_users_home_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/dora")
    monkeypatch.setenv("USER", "dora")
    assert scrub("/srv/people/dora/.cache") == "~/.cache"
    assert scrub("/scratch/dora/data") == "/scratch/~/data"
    assert scrub("/srv/people/dorado") == "/srv/people/dorado"
    monkeypatch.setenv("HOME", "/")
    assert scrub("/etc/x") == "/etc/x"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_REGION", "WANDB_API_KEY", "MY_PASSWORD", "db_secret", "GOOGLE_CREDENTIALS"]
)
def test_values_of_secret_names_are_hidden(name: str) -> None:
    assert shown_value(name, "value") == "(set, not shown)"
    assert shown_value("OMP_NUM_THREADS", "4") == "4"
