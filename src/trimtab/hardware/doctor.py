"""What is installed and there, and what would bite: `trimtab doctor`. It reports; it never repairs anything.

It works in a broken installation: versions are read from metadata, torch is the one package that is imported, and
a package that is missing or does not import is a finding.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.cache import cache_root
from trimtab.errors import RequestError
from trimtab.hardware.environment import check_environment
from trimtab.hardware.findings import HIDDEN, MARKS, Remark, scrub, shown_value
from trimtab.hardware.launcher import RANK_VARIABLES, Launcher, detect_launcher
from trimtab.hardware.machine import (
    BUILTIN_PACKAGE,
    check_cpu,
    check_disk,
    check_gpus,
    check_tiles,
    find_builtin_model,
    find_ollama,
    free_disk,
)
from trimtab.hardware.nvidia import NvidiaDriver, find_driver
from trimtab.hardware.packages import (
    Package,
    check_neighbours,
    check_packages,
    check_python,
    installed_version,
    known_packages,
)
from trimtab.hardware.probe import Cpu, Hardware, probe, probe_cpu

_SHOWN = re.compile(
    r"(ACCELERATE|AWS|CUDA|GLOO|HF|HIP|NCCL|OMP|OMPI_COMM_WORLD|PMI|PYTORCH|TRANSFORMERS|TRIMTAB)_"
    r"|MKL_NUM|SLURM_(LOCALID|NTASKS|PROCID|STEP_ID|STEP_NUM)|TORCH"
)
# Internal host names say nothing about a fault, and something about their owner.
_HOSTS = frozenset({"MASTER_ADDR"})


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was found. `as_dict` is the `--json` output; its keys are stable, new ones may be added."""

    packages: tuple[Package, ...]
    hardware: Hardware
    driver: NvidiaDriver
    torch_error: str
    cache: Path
    findings: tuple[Remark, ...]
    environment: Mapping[str, str]

    @property
    def bites(self) -> int:
        return sum(finding.level == "bite" for finding in self.findings)

    def lines(self) -> list[str]:
        """One aligned line for each finding, and a last one that sums up."""
        width = min(30, max(len(finding.topic) for finding in self.findings))
        lines = []
        for finding in self.findings:
            change = f" → {scrub(finding.change)}" if finding.change else ""
            lines.append(f"{MARKS[finding.level]} {finding.topic:<{width}}  {scrub(finding.found)}{change}")
        many = "thing" if self.bites == 1 else "things"
        lines.append(
            f"\n{self.bites} {many} would bite (✗ above)" if self.bites else "\nnothing here would bite"
        )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """verdict: fine | bites. findings: level (ok | absent | note | bite), topic, found, change.

        torch: version, cuda_build (null without CUDA), error (empty when it works). packages: name, version (null
        when absent), needs, required, purpose. cpu and accelerators: as `trimtab.hardware` has them, memory in
        bytes. nvidia_driver: version, gpus, error. launcher: name, ranks and stale variables. cache: path and
        bytes. tools: programs on the PATH. builtin_model: version of its package, or null. environment: variables
        that matter, with secrets hidden.
        """
        report = {
            "verdict": "bites" if self.bites else "fine",
            "findings": [asdict(finding) for finding in self.findings],
            "trimtab": __version__,
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "platform": {
                "system": platform.system(),
                "release": platform.release(),
                "machine": platform.machine(),
            },
            "torch": {
                "version": self.hardware.torch_version or None,
                "cuda_build": self.hardware.cuda_build,
                "error": self.torch_error,
            },
            "packages": [asdict(package) for package in self.packages],
            "cpu": asdict(self.hardware.cpu),
            "accelerators": [asdict(gpu) for gpu in self.hardware.accelerators],
            "nvidia_driver": asdict(self.driver),
            "launcher": {
                key: value for key, value in asdict(self.hardware.launcher).items() if key != "exports"
            },
            "cache": {"path": str(self.cache), "free_bytes": free_disk(self.cache)},
            "tools": {"ollama": shutil.which("ollama") is not None},
            "builtin_model": installed_version(BUILTIN_PACKAGE),
            "environment": dict(self.environment),
        }
        cleaned: dict[str, Any] = _scrubbed(report)
        return cleaned


def examine(env: Mapping[str, str] | None = None) -> Report:
    """Look at everything."""
    env = os.environ if env is None else env
    packages, package_findings = _packages()
    launcher, launcher_finding = _launcher(env)
    hardware, torch_error, torch_warnings = _hardware(launcher)
    driver = find_driver()
    cache = cache_root()
    findings = (
        Remark("ok", "trimtab", __version__),
        *(f for f in package_findings if f.topic != "torch" or f.level == "bite"),
        *_torch(hardware, torch_error),
        check_cpu(hardware.cpu),
        *check_tiles(env),
        *check_gpus(env, hardware, driver, torch_warnings),
        launcher_finding,
        check_disk(cache),
        find_ollama(),
        find_builtin_model(),
        *check_environment(env, hardware, driver, _network_interfaces()),
    )
    return Report(
        packages=tuple(packages),
        hardware=hardware,
        driver=driver,
        torch_error=torch_error,
        cache=cache,
        findings=findings,
        environment=_shown_environment(env),
    )


def _packages() -> tuple[list[Package], list[Remark]]:
    try:
        packages = known_packages()
        return packages, [check_python(), *check_packages(packages), *check_neighbours()]
    except importlib.metadata.PackageNotFoundError as error:
        found, change = f"no metadata of {error.name}: versions were not compared", "pip install -e ."
    except ImportError as error:
        found, change = f"{error}: versions were not compared", f"pip install {error.name or 'packaging'}"
    return [], [Remark("bite", "packages", found, change)]


def _launcher(env: Mapping[str, str]) -> tuple[Launcher, Remark]:
    try:
        launcher = detect_launcher(env)
    except RequestError as error:
        what, *rest = str(error).split("\n  ")
        change = next((line.removeprefix("change: ") for line in rest if line.startswith("change: ")), "")
        return Launcher(name="none"), Remark("bite", "launcher", what, change)
    if launcher.stale:
        return launcher, Remark(
            "bite",
            "launcher",
            f"{', '.join(launcher.stale)} set, but no launcher (torchrun, srun, mpirun) started this process: stale",
            f"unset {' '.join(launcher.stale)}",
        )
    if launcher.name == "none":
        return launcher, Remark("absent", "launcher", "none; no rank variables are set")
    where = f"rank {launcher.rank} of {launcher.world_size}, local rank {launcher.local_rank}"
    return launcher, Remark("ok", "launcher", f"{launcher.name}: {where}")


def _hardware(launcher: Launcher) -> tuple[Hardware, str, list[str]]:
    """The machine, torch's failure if it fails, and what torch warned of while it looked around."""
    hardware, error = Hardware(cpu=_cpu_or_unknown(), launcher=launcher), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _import_torch()
        except (ImportError, OSError, RuntimeError) as problem:
            error = f"does not import: {type(problem).__name__}: {problem}"
        else:
            try:
                hardware = probe(launcher, hardware.cpu)
            except RuntimeError as problem:
                error = f"fails when it looks for GPUs: {problem}"
    warned = [str(w.message) for w in caught if issubclass(w.category, (UserWarning, RuntimeWarning))]
    return hardware, error, warned


def _import_torch() -> None:
    import torch

    if not hasattr(torch, "__version__"):
        # A file of the user's own, or what an uninstall left behind.
        where = getattr(torch, "__file__", None) or list(getattr(torch, "__path__", []))
        raise ImportError(f"the module torch at {where} is not PyTorch")


def _cpu_or_unknown() -> Cpu:
    try:
        return probe_cpu()
    except ImportError:
        # psutil is missing, which the processor's own line reports.
        return Cpu(
            model=platform.machine(), cores=os.cpu_count() or 1, total_bytes=0, free_bytes=0, bf16=False
        )


def _torch(hardware: Hardware, error: str) -> Iterator[Remark]:
    version = installed_version("torch")
    if not error:
        build = f"built for CUDA {hardware.cuda_build}" if hardware.cuda_build else "built without CUDA"
        yield Remark("ok", "torch", f"{hardware.torch_version}, {build}")
    elif version is not None:  # its absence is already a finding among the packages
        yield Remark("bite", "torch", f"{version} {error}", "reinstall torch, in a build for this machine")


def _network_interfaces() -> list[str]:
    try:
        import psutil
    except ImportError:
        return []
    return sorted(psutil.net_if_addrs())


def _shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    names = sorted(name for name in env if name in RANK_VARIABLES or _SHOWN.match(name))
    return {name: HIDDEN if name in _HOSTS else shown_value(name, env[name]) for name in names}


def _scrubbed(item: Any) -> Any:
    if isinstance(item, str):
        return scrub(item)
    if isinstance(item, Mapping):
        return {key: _scrubbed(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_scrubbed(value) for value in item]
    return item
