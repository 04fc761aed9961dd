"""What all sections of the settings share, and what a recipe's own section says besides its settings.

A new recipe brings one `RecipeSection` in a file of its own, a field for it in `Config` and its name among `recipe`'s;
everything else in config/ is derived from those. Declares; never judges a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from trimtab.config.rule import Rules

if TYPE_CHECKING:
    from trimtab.config.schema import Config


class Default(NamedTuple):
    """A value that a recipe chose, and why."""

    key: str
    value: Any
    reason: str


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, docstrings under fields become their description."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, allow_inf_nan=False
    )


class RecipeSection(Section):
    """The settings of one recipe, with what the recipe makes of the general ones."""

    recipe: ClassVar[str]
    """The recipe that these settings are for."""

    without_effect: ClassVar[tuple[str, ...]] = ()
    """General settings that this recipe does not use."""

    addresses: ClassVar[dict[str, str]] = {}
    """Those of its settings that may be an address, and how to do without a secret in it."""

    rules: ClassVar[Rules] = Rules()
    """What must hold between its settings and the others; looked at only where the recipe runs."""

    @property
    def through_chat_template(self) -> bool:
        """Whether the recipe puts what it trains on through the model's chat template."""
        return True

    def defaults(self, config: Config) -> list[Default]:
        """Values for settings that nobody set; null counts as unset. `config` is the whole that this belongs to."""
        return []
