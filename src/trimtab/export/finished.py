"""A run folder whose training has ended: whether all of it is there, and what it says of its model. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.keys import recipe_sections
from trimtab.errors import RequestError
from trimtab.reading import read_json_object
from trimtab.recipes.kept_folder import check_kept
from trimtab.recipes.table import recipe_of

if TYPE_CHECKING:
    from trimtab.config import Config


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run folder whose training has ended."""

    folder: Path
    config: Config
    weights: Path
    """`adapter/` for method lora, `model/` for method full."""

    @property
    def lora(self) -> bool:
        return self.config.method == "lora"


def read_run(run_dir: Path) -> FinishedRun:
    """Open a run folder, or raise RequestError that names everything that is missing."""
    from trimtab.config import load_config

    if not run_dir.is_dir():
        raise RequestError.of(
            f"{run_dir}: no such run folder",
            "an export reads what a training run kept",
            "give the run's output_dir",
        )
    if not (run_dir / "config.yaml").is_file():
        raise RequestError.of(
            f"{run_dir}: no config.yaml",
            "a run keeps its settings there, so this is no run folder",
            "give the folder that `trimtab train` printed",
        )
    config = load_config(run_dir / "config.yaml", [])
    if config.method == "lora":
        weights = run_dir / "adapter"
        needed = [weights / "adapter_config.json", weights / "adapter_model.safetensors"]
    else:
        weights = run_dir / "model"
        needed = [weights / "config.json"]
    missing = [file for file in [*needed, run_dir / "summary.json"] if not file.is_file()]
    if not missing and _read(run_dir / "summary.json").get("error"):
        raise RequestError.of(
            f"{run_dir}: the run failed, as its summary.json says",
            "what it kept may be of another run, or not whole",
            "finish it: the same `trimtab train` command with training.resume=true",
        )
    if config.method == "full" and not any(weights.glob("*.safetensors")):
        missing.append(weights / "*.safetensors")
    if missing:
        raise RequestError.of(
            f"{run_dir}: missing {', '.join(str(file.relative_to(run_dir)) for file in missing)}",
            "these are written when training ends, so the run is not finished",
            "finish it: the same `trimtab train` command with training.resume=true",
        )
    check_kept(weights)
    return FinishedRun(folder=run_dir, config=config, weights=weights)


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, f"the run's {file.name}", "put back the file that the run wrote")


def through_chat_template(run: FinishedRun) -> bool:
    """Whether the run trained on conversations, as its report on the data tells; else as its settings do."""
    report = run.folder / "data.json"
    told = _read(report) if report.is_file() else {}
    if "chat" in told:
        return bool(told["chat"])
    form = told["train"].get("format") if isinstance(told.get("train"), dict) else run.config.data.format
    return form != "text" and all(section.through_chat_template for section in recipe_sections(run.config))


def run_tokenizer(run: FinishedRun) -> Any:
    """The tokenizer that training used: the one kept with the weights, chat template and all."""
    from transformers import AutoTokenizer

    from trimtab.models import load_tokenizer
    from trimtab.models.own_code import code_options

    if not (run.weights / "tokenizer_config.json").is_file():
        return load_tokenizer(run.config.model)
    return AutoTokenizer.from_pretrained(run.weights, **code_options(run.config.model, str(run.weights)))


def run_processor(run: FinishedRun) -> Any:
    """What goes beside the weights: the tokenizer, or the base model's own processor around one."""
    from trimtab.models.load import load_processor

    family = recipe_of(run.config).family
    tokens = family.processor == "AutoTokenizer"
    return run_tokenizer(run) if tokens else load_processor(run.config.model, family)


def model_config(run: FinishedRun) -> Any:
    """The architecture's config, read without weights."""
    from trimtab.export.weights import read_config

    return read_config(run.config.model, None if run.lora else run.weights)


def base_name(run: FinishedRun) -> str:
    """The base model's name for metadata; of a folder only its last part."""
    name = run.config.model.name
    return Path(name).name if Path(name).is_dir() else name


def license_of(run: FinishedRun) -> str | None:
    """The base model's licence where it is known: from its model card, or the built-in model's own."""
    from trimtab.models import builtin, model_source

    if run.config.model.name == builtin.NAME:
        return "apache-2.0"
    card = Path(model_source(run.config.model)) / "README.md"
    if not card.is_file():
        return None
    from huggingface_hub import ModelCard

    found = ModelCard.load(card, ignore_metadata_errors=True).data.license
    return found if isinstance(found, str) and found != "other" else None
