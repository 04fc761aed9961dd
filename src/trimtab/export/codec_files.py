"""What a merged model that speaks keeps beside its weights: the codec that was learned for it, or the name of its own.

Without that, its codes are numbers that nobody turns into sound. The base model's own processor files are copied as
they are; a learned codec goes into the folder, and is named as transformers' processors name theirs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from trimtab.config import Config

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
    """A codec that lies inside the base model's folder goes along."""
    said = json.loads(file.read_text(encoding="utf-8"))
    place = (said.get("audio_tokenizer") or said).get("audio_tokenizer_name_or_path")
    if (
        place
        and not Path(place).is_absolute()
        and (source / place).is_dir()
        and not (target / place).exists()
    ):
        shutil.copytree(source / place, target / place)
