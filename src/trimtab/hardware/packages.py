"""Installed packages and whether they go together, from their metadata alone. It imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.hardware.findings import Remark

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OPTIONAL = {
    "s3fs": "data from s3:// addresses",
    "tensorboard": "report_to tensorboard",
    "triton": "compiled GPU kernels",
    "liger-kernel": "fused GPU kernels",
    "flash-attn": "flash attention by its own package",
    "bitsandbytes": "4-bit and 8-bit weights",
    "vllm": "fast generation",
}
"""Packages that are used when they are there, and for what."""

# Packages whose own demands on their neighbours are worth a look: the ones that pin torch, and the ones we use.
_PINNING = (
    "torchvision",
    "torchaudio",
    "xformers",
    "vllm",
    "flash-attn",
    "liger-kernel",
    "bitsandbytes",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
)
_SAME_BUILD = ("torchvision", "torchaudio")


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package as it is installed, or None for its version when it is not."""

    name: str
    version: str | None
    needs: str
    """The versions that this project asks for, such as `>=2.11`; empty when it asks for none."""
    required: bool
    purpose: str = ""


def installed_version(name: str) -> str | None:
    """None: not installed. `?`: there, but its metadata does not say."""
    try:
        return importlib.metadata.version(name) or "?"
    except importlib.metadata.PackageNotFoundError:
        return None


def known_packages(distribution: str = "trimtab") -> list[Package]:
    """What this project requires, by its own metadata, then what it can use."""
    requirements = _requirements(distribution)
    bounds = {requirement.name: str(requirement.specifier) for requirement in reversed(requirements)}
    required = {r.name: str(r.specifier) for r in requirements if _applies(r)}
    bounds |= required
    wanted = (*((name, "") for name in sorted(required, key=str.lower)), *OPTIONAL.items())
    return [
        Package(
            name=name,
            version=installed_version(name),
            needs=bounds.get(name, ""),
            required=not why,
            purpose=why,
        )
        for name, why in wanted
    ]


def _applies(requirement: Requirement) -> bool:
    """Whether it is asked for without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def check_packages(packages: Iterable[Package]) -> Iterator[Remark]:
    """Each package: there, missing, or of a version that will not do."""
    for package in packages:
        wanted = f"pip install '{package.name}{package.needs}'"
        if package.version is None:
            if package.required:
                yield Remark("bite", package.name, f"not installed; needs {package.needs or 'any'}", wanted)
            else:
                yield Remark("absent", package.name, f"not installed ({package.purpose})")
        elif not _meets(package.version, package.needs):
            yield Remark(
                "bite" if package.required else "note",
                package.name,
                f"{package.version} is too old or too new; needs {package.needs}",
                wanted,
            )
        else:
            yield Remark("ok", package.name, package.version)


def check_python(distribution: str = "trimtab") -> Remark:
    version = platform.python_version()
    needs = importlib.metadata.metadata(distribution)["Requires-Python"] or ""
    if not _meets(version, needs):
        return Remark("bite", "python", f"{version}; needs {needs}", "use a Python of that version")
    return Remark("ok", "python", f"{version} on {platform.system()} {platform.machine()}")


def check_neighbours() -> Iterator[Remark]:
    """Packages that are installed, and ask for another version of a neighbour than the one that is there."""
    for name in _PINNING:
        version = installed_version(name)
        if version is None:
            continue
        try:
            requirements = _requirements(name)
        except ValueError as error:  # packaging's InvalidRequirement
            yield Remark("note", name, f"{version}: what it asks for cannot be read ({error})")
            continue
        for requirement in requirements:
            there = installed_version(requirement.name) if _applies(requirement) else None
            if there is not None and not _meets(there, str(requirement.specifier)):
                yield Remark(
                    "bite",
                    name,
                    f"{version} asks for {requirement.name}{requirement.specifier}, and {there} is installed",
                    f"install the {name} that goes with {requirement.name} {there}, or uninstall {name}",
                )
        if name in _SAME_BUILD:
            yield from _check_build(name, version)


def _check_build(name: str, version: str) -> Iterator[Remark]:
    """`torchvision 0.28.0+cpu` beside `torch 2.13.0+cu130`: the versions agree, the compiled code does not."""
    torch = installed_version("torch") or ""
    build, torch_build = version.partition("+")[2], torch.partition("+")[2]
    if build and torch_build and build != torch_build:
        yield Remark(
            "bite",
            name,
            f"{version} is built for {build}, and torch {torch} for {torch_build}",
            f"install both from the same index, or uninstall {name}",
        )


def _requirements(distribution: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(text) for text in importlib.metadata.requires(distribution) or []]


def _meets(version: str, needs: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if not needs:
        return True
    try:
        return SpecifierSet(needs).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
