"""Run: data formats, declared schemas, sources (local, S3-compatible, hub), labels. Never touches a device."""
