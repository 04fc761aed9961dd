"""Run: data formats, declared schemas, sources (local, S3-compatible, hub), labels. Never touches a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.data.prepare import DataReport, PreparedData, prepare_data

__all__ = ["DataReport", "PreparedData", "prepare_data"]


def __getattr__(name: str) -> Any:
    # Preparing needs the datasets library; tasks and prompts do not, and are used where it is not installed.
    if name in __all__:
        from trimtab.data import prepare

        return getattr(prepare, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
