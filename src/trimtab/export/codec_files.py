"""What a merged model that speaks keeps beside its weights: the codec that was learned for it, or the name of its own.

Without that, its codes are numbers that nobody turns into sound. The base model's own processor files are copied as
they are; a learned codec goes into the folder, and is named as transformers' processors name theirs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from trimtab.config import Config
from trimtab.reading import read_json_object

FOLDER = "codec"
_PREPROCESSOR = "preprocessor_config.json"


def keep_codec(config: Config, run_folder: Path, target: Path) -> None:
    """Write into `target` what is needed to hear the run's model."""
    from transformers.utils import AUDIO_TOKENIZER_NAME, PROCESSOR_NAME, cached_file

    from trimtab.models.load import BUILT_IN, model_source

    learned = run_folder / FOLDER
    if learned.is_dir():
        shutil.copytree(learned, target / FOLDER)
        named = {"audio_tokenizer_class": "SpectralCodec", "audio_tokenizer_name_or_path": FOLDER}
        (target / AUDIO_TOKENIZER_NAME).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
        return
    if config.model.name in BUILT_IN:
        return
    source = model_source(config.model)
    for name in (PROCESSOR_NAME, _PREPROCESSOR, AUDIO_TOKENIZER_NAME):
        found = cached_file(
            source, name, revision=config.model.revision, _raise_exceptions_for_missing_entries=False
        )
        if found:
            shutil.copy(found, target / name)
            _copy_named(Path(found), Path(source), target)


def _copy_named(file: Path, source: Path, target: Path) -> None:
    """A codec that lies inside the base model's folder goes along; what lies elsewhere is only named."""
    said = read_json_object(file, f"the model's {file.name}", "fetch the model again")
    own = said.get("audio_tokenizer")
    place = (own if isinstance(own, dict) else said).get("audio_tokenizer_name_or_path")
    if not isinstance(place, str) or not place or Path(place).is_absolute() or ".." in Path(place).parts:
        return
    folder = source / place
    inside = folder.is_dir() and folder.resolve().is_relative_to(source.resolve())
    if inside and folder.resolve() != source.resolve() and not (target / place).exists():
        shutil.copytree(folder, target / place)
