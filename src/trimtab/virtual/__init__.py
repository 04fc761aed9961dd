"""Virtual accelerators: CUDA devices that are not there, with real values and CUDA's placement rules.

Depends on torch alone. Nothing is patched until a machine is put in force, and nothing stays patched after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.virtual.context import install, uninstall, virtual_gpus
    from trimtab.virtual.state import Machine, machine

__all__ = ["Machine", "install", "machine", "uninstall", "virtual_gpus"]


def __getattr__(name: str) -> Any:
    # torch is imported only when a name is used: the pytest plugin loads this package in every test run.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trimtab.virtual import context, state

    return getattr(state if name in ("Machine", "machine") else context, name)
