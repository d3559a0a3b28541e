# SPDX-License-Identifier: Apache-2.0
"""Checked access to the fields of a configuration: every error names the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhma.errors import ConfigError
from kvhma.text import quote

ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
}
"""Other names of a field in older architectures."""

_MAX_SIZE = 1 << 31
_MAX_LAYERS = 4096


class Fields:
    """The fields of one configuration, with the architecture's defaults for missing fields.

    A file may leave out a field that equals the default, and may give ``null`` for a derived value.
    """

    def __init__(self, form: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Store the configuration of the language model itself, and the defaults of its architecture."""
        self._form = form
        self._defaults = defaults

    def get(self, *names: str) -> Any:
        """Return the value of the first of `names` that is given, else of the first with a default, else None."""
        for source in (self._form, self._defaults):
            for name in _with_aliases(names):
                if name in source:
                    return source[name]
        return None

    def size(self, *names: str, derived: int | None = None) -> int:
        """Return a positive integer.

        Args:
            names: names of the field, the usual one first.
            derived: the value if neither the file nor the architecture has the field.

        Raises:
            ConfigError: it is missing, or not a positive integer of reasonable size.
        """
        value, name = self.get(*names), self.called(*names)
        if value is None or value == "auto":
            value = self._defaults.get(names[0]) if derived is None else derived
        if value is None:
            raise ConfigError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            if not (isinstance(value, float) and value.is_integer()):
                raise ConfigError(f"{name} {quote(value)}: must be an integer")
            value = int(value)
        if not 1 <= value <= _MAX_SIZE:
            raise ConfigError(f"{name} {value}: must be 1 to {_MAX_SIZE}")
        return value

    def called(self, *names: str) -> str:
        """Return which of `names` the file has, or else the first."""
        return next((name for name in _with_aliases(names) if name in self._form), names[0])

    def optional_size(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is null, 0 or missing without a default."""
        return None if self.get(name) in (None, 0) else self.size(name)

    def layers(self) -> int:
        """Return the number of layers, within a generous limit.

        Raises:
            ConfigError: as for `size`, or there are too many.
        """
        count = self.size("num_hidden_layers")
        if count > _MAX_LAYERS:
            raise ConfigError(f"num_hidden_layers {count}: at most {_MAX_LAYERS}")
        return count

    def words(self, *names: str) -> tuple[str, list[str]] | None:
        """Return name and value of a list of words, one for each layer; None without such a list.

        Raises:
            ConfigError: the value is something else, or too long.
        """
        for name in names:
            value = self._form.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise ConfigError(f"{name} {quote(value)}: must be a list of strings")
            if not 1 <= len(value) <= _MAX_LAYERS:
                raise ConfigError(f"{name} has {len(value)} entries; 1 to {_MAX_LAYERS} can be read")
            return name, value
        return None

    def indices(self, name: str) -> set[int] | None:
        """Return a list of layer indices as a set; None without such a list.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            raise ConfigError(f"{name} {quote(value)}: must be a list of integers")
        return set(value)


def _with_aliases(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(alias for name in names for alias in (name, *ALIASES.get(name, ())))
