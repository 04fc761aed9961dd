"""Run: data formats, declared schemas, sources (local, S3-compatible, hub), labels. Never touches a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.data.prepare import PreparedData, prepare_data
    from trimtab.data.report import DataReport

__all__ = ["DataReport", "PreparedData", "prepare_data"]


def __getattr__(name: str) -> Any:
    # Preparing needs the datasets library; tasks and prompts do not, and are used where it is not installed.
    if name in ("PreparedData", "prepare_data"):
        from trimtab.data import prepare

        return getattr(prepare, name)
    if name == "DataReport":
        from trimtab.data.report import DataReport

        return DataReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
