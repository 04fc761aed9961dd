"""Run: data formats, declared schemas, sources (local, S3-compatible, hub), labels. Never touches a device."""

from trimtab.data.prepare import PreparedData, prepare_data
from trimtab.data.report import DataReport

__all__ = ["DataReport", "PreparedData", "prepare_data"]
