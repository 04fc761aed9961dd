"""Keep: what a run made, in the form that others use. Merged safetensors, GGUF for llama.cpp, Ollama.

Nothing here trains, and nothing here writes half a file.
"""

from trimtab.export.run import ExportResult, check_export, export_as_asked, export_run

__all__ = ["ExportResult", "check_export", "export_as_asked", "export_run"]
