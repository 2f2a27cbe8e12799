"""The base of every configuration section: open (`Config`) or strict (`StrictConfig`).

A third kind, `ExtensibleConfig`, is checked in two steps: its own fields when it is read, further
keys when the class that the section names is known (`resolve_extras`), because a registered class
may declare keys of its own. Knows nothing about torch.
"""

from __future__ import annotations

import pathlib
from types import NoneType
from typing import TYPE_CHECKING, Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rlightning.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

__all__ = ["Config", "ExtensibleConfig", "StrictConfig", "resolve_extras"]


class Config(BaseModel):
    """An open section: any key is accepted and nested dictionaries become `Config` too."""

    # NaN and infinity are refused; a field where infinity means "no limit" says so itself.
    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="after")
    def _wrap_nested_dictionaries(self) -> Self:
        extra = self.__pydantic_extra__ or {}
        for key, value in extra.items():
            if isinstance(value, dict):
                odd = [name for name in value if not isinstance(name, str)]
                if odd:
                    raise ValueError(f"keys must be strings; {key!r} has the key {odd[0]!r}")
                extra[key] = Config(**value)
        return self

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the key `name`, or `default` where there is none."""
        if name in type(self).model_fields:
            return getattr(self, name)
        return (self.__pydantic_extra__ or {}).get(name, default)

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"{key!r} is not set.{did_you_mean(key, self.keys())}")
        return self.get(key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or key in (self.__pydantic_extra__ or {})

    def keys(self) -> KeysView[str]:
        """Return the names of all keys, so that ``**section`` works."""
        return (dict.fromkeys(type(self).model_fields) | (self.__pydantic_extra__ or {})).keys()

    @classmethod
    def from_dict(cls, data: dict[str, Any] | Config | None, *, path: str = "") -> Self:
        """Return the section that `data` describes; without any, the section of all defaults.

        Args:
            data: keys and values.
            path: where the section stands in a run's configuration, for messages.

        Raises:
            ConfigError: keys are unknown or values invalid; each is listed with its path.
        """
        try:
            return cls(**(data.to_dict() if isinstance(data, Config) else data or {}))
        except ValidationError as error:
            raise ConfigError(_render(error, path or cls.__name__, prefix=path)) from error

    @classmethod
    def read(cls, section: Config | None) -> Self:
        """Return this part of a larger section; what that leaves out or sets to null, default.

        Raises:
            ConfigError: values are invalid.
        """
        given = {} if section is None else {name: section.get(name) for name in cls.model_fields}
        plain = {k: v.to_dict() if isinstance(v, Config) else v for k, v in given.items()}
        return cls.from_dict({name: value for name, value in plain.items() if value is not None})

    @classmethod
    def from_omegaconf(cls, omega_config: Any) -> Self:
        """Return the section that an OmegaConf node describes, interpolations resolved."""
        from omegaconf import OmegaConf

        data = OmegaConf.to_container(omega_config, resolve=True, throw_on_missing=True)
        if not isinstance(data, dict):
            raise ConfigError(f"expected a mapping of keys, found a {type(data).__name__}")
        return cls.from_dict({str(key): value for key, value in data.items()})

    @classmethod
    def load_yaml(cls, file_path: str | pathlib.Path | None = None) -> Self:
        """Return the section in a YAML file; without a file, the section of all defaults."""
        if file_path is None:
            return cls.from_dict({})
        data = yaml.safe_load(pathlib.Path(file_path).read_text(encoding="utf-8")) or {}
        if not isinstance(data, dict):
            raise ConfigError(f"{file_path}: expected a mapping, found a {type(data).__name__}")
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Return all keys and values as plain nested dictionaries."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Return all keys and values as YAML."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


class StrictConfig(Config):
    """A section that refuses keys it does not know, with a suggestion."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _refuse(data.keys() - cls.model_fields.keys(), known=cls.model_fields, owner="")
        return data


class ExtensibleConfig(Config):
    """A section whose registered class may declare further keys; see `resolve_extras`."""


def resolve_extras(
    section: ExtensibleConfig,
    declared: Iterable[type[Config]],
    *,
    path: str,
    owner: str,
    refuse_others: bool = True,
) -> None:
    """Check `section`'s further keys against what its registered classes declare; fill defaults.

    A declared key that the section leaves out, or sets to null where the declaration has no null,
    gets the declared default. A declaration may also name one of the section's own optional fields,
    to give it a default.

    Args:
        section: changed in place.
        declared: the ``Extras`` models of the classes that read this section.
        path: where the section stands, for messages, for example ``"train"``.
        owner: who declares, for messages, for example ``"PPOPolicy"``.
        refuse_others: False only fills defaults, where more classes are to declare later.

    Raises:
        ConfigError: a key is declared by nobody, or a value does not fit.
    """
    declared = list(declared)
    extra = section.__pydantic_extra__ or {}
    fields = type(section).model_fields.items()
    known = {name: field for name, field in fields if not field.exclude}  # what users write
    for model in declared:
        known |= model.model_fields
    try:
        if refuse_others:
            _refuse(extra.keys() - known.keys(), known=known, owner=owner)
        for model in declared:
            checked = model(**_given(section, model))
            for name in model.model_fields:
                setattr(section, name, getattr(checked, name))
    except ValidationError as error:
        raise ConfigError(_render(error, path, prefix=path)) from error
    except ValueError as error:
        raise ConfigError(f"`{path}`: {error}") from error


def _given(section: ExtensibleConfig, model: type[Config]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        value = section.get(name)
        if isinstance(value, Config):
            value = value.to_dict()  # to be read again, as the type that `model` declares
        null_is_meant = name in section.model_fields_set and NoneType in get_args(field.annotation)
        if name in section and (value is not None or null_is_meant):
            given[name] = value
    return given


def _refuse(unknown: Iterable[str], *, known: Iterable[str], owner: str) -> None:
    known = sorted(known)
    lines = [f"unknown key {key!r}.{did_you_mean(key, known)}" for key in sorted(unknown)]
    if lines:
        declare = (
            f" A class of your own declares further keys as a nested `Extras` model ({owner})."
            if owner
            else ""
        )
        raise ValueError(f"{' '.join(lines)} Known keys: {', '.join(known)}.{declare}")


def _render(error: ValidationError, name: str, *, prefix: str = "") -> str:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in (*filter(None, [prefix]), *item["loc"]))
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"  field '{place or name}': {message}")
    return f"the configuration {name} is not valid:\n" + "\n".join(lines)
