"""Keep: what a run made, in the form that others use. Merged safetensors, GGUF for llama.cpp, Ollama.

Nothing here trains, and nothing here writes half a file.
"""

from trimtab.export.run import ExportResult, export_run

__all__ = ["ExportResult", "export_run"]
