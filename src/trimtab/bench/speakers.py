"""How alike two voices are: Resemblyzer's speaker encoder, whose weights come with it, always on the CPU.

A likeness is the cosine between two embeddings: 1 for the same, and seldom under 0.4, for even strangers are people;
what tells is whether a clip is nearer to its own speaker than to others. Needs the extra `judge`; nothing is fetched.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RATE = 16_000
"""Samples a second of the encoder."""
LEVEL = -30.0
"""Loudness of all clips, in decibels of full scale: the one to which the encoder raises quiet clips by itself."""
SHORTEST = RATE // 2
"""Samples of speech that an embedding is made of at least."""


class SpeakerEncoder:
    """Clips to embeddings of unit length."""

    def __init__(self) -> None:
        """RequestError where the encoder or what it stands on is not installed."""
        try:
            with warnings.catch_warnings():
                # It imports from a place that scipy calls old.
                warnings.simplefilter("ignore", DeprecationWarning)
                from resemblyzer import VoiceEncoder, preprocess_wav
        except (ImportError, OSError) as error:
            raise RequestError.of(
                f"likeness of speakers needs Resemblyzer, and it cannot be imported ({error})",
                "it is the encoder that voices are compared by; it stands on webrtcvad, which pip compiles and which "
                "asks for the pkg_resources of an older setuptools",
                "pip install 'trimtab[judge]'; without a compiler: pip install librosa webrtcvad-wheels, then "
                "pip install --no-deps Resemblyzer",
            ) from None
        # Its weights are read by `torch.load`, which takes tensors and plain values alone unless it is told otherwise.
        self._encoder = VoiceEncoder("cpu", verbose=False).eval()
        self._prepared = preprocess_wav

    def embed(self, samples: NDArray[np.float32], rate: int) -> NDArray[np.float32] | None:
        """The voice of a clip; None where there is no voice in it to be compared."""
        import numpy as np

        from trimtab.data.sound import resample

        sound = resample(samples, rate, RATE)
        loud = float(np.sqrt(np.mean(np.square(sound, dtype=np.float64)))) if len(sound) >= SHORTEST else 0.0
        if loud == 0:
            return None
        # Its own way makes quiet clips as loud as this and leaves loud ones, which it then takes for other voices.
        sound = np.clip(sound * np.float32(10 ** (LEVEL / 20) / loud), -1.0, 1.0)
        # What its detector of voices takes for a pause is shortened; that may be all of a clip.
        spoken = self._prepared(sound)
        if len(spoken) < SHORTEST:
            return None
        found: NDArray[np.float32] = self._encoder.embed_utterance(spoken)
        return found if bool(np.isfinite(found).all()) else None


def likeness(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The cosine between two embeddings."""
    import numpy as np

    return float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


def centre(embeddings: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """One voice from several clips of it: the mean of their embeddings, of unit length."""
    import numpy as np

    mean = np.mean(np.stack(embeddings), axis=0)
    found: NDArray[np.float32] = mean / np.linalg.norm(mean)
    return found
