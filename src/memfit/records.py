"""Frozen records: what `@dataclass(frozen=True, kw_only=True)` gives, at a tenth of its cost at start-up.

The standard dataclass imports `inspect` and compiles several functions for every class, which alone took a third of the time of a
whole answer. A `Record` is declared in the same way, is understood by type checkers (PEP 681), and still works with
`dataclasses.replace`, `fields` and `asdict`, whose view of it is made only when they ask.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform


def annotations_of(cls: type) -> dict[str, Any]:
    """The annotations that a class itself declares."""
    found: dict[str, Any] = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 - inspect is what this avoids
    return found


class _DataclassFields:
    """What the dataclasses module looks for on a class, made from the record's own fields on first use."""

    def __get__(self, instance: object, owner: type[Record]) -> dict[str, Any]:
        import dataclasses

        made: dict[str, Any] = {}
        for name in owner.field_names:
            default: Any = owner.defaults.get(name, dataclasses.MISSING)
            mutable = isinstance(default, dict | list | set)
            one: Any = dataclasses.field(default_factory=default.copy) if mutable else dataclasses.field(default=default)
            one.name, one.type, one.kw_only = name, owner.field_types[name], True
            one._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
            made[name] = one
        return made


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """Base of frozen records with keyword-only fields; a field is an annotation, its default the class attribute."""

    field_names: ClassVar[tuple[str, ...]] = ()
    field_types: ClassVar[dict[str, Any]] = {}
    defaults: ClassVar[dict[str, Any]] = {}
    __dataclass_fields__ = _DataclassFields()

    def __init_subclass__(cls) -> None:
        types = dict(cls.field_types)
        defaults = dict(cls.defaults)
        for name, annotation in annotations_of(cls).items():
            if str(annotation).startswith("ClassVar"):
                continue
            types[name] = annotation
            if name in cls.__dict__:
                defaults[name] = cls.__dict__[name]
        cls.field_types = types
        cls.field_names = tuple(types)
        cls.defaults = defaults

    def __init__(self, **values: Any) -> None:
        own = self.__dict__
        own.update(self.defaults)
        own.update(values)
        if own.keys() != self.field_types.keys():
            unknown = sorted(values.keys() - self.field_types.keys())
            missing = [name for name in self.field_names if name not in own]
            wrong = f"unexpected {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
            raise TypeError(f"{type(self).__name__}: {wrong}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((type(self), *[getattr(self, name) for name in self.field_names]))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.field_names)
        return f"{type(self).__name__}({shown})"

    def as_dict(self) -> dict[str, Any]:
        """Its fields by name, one level deep."""
        return {name: getattr(self, name) for name in self.field_names}

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some fields."""
        if not changes.keys() <= self.field_types.keys():
            return type(self)(**{**self.as_dict(), **changes})  # which says what is wrong
        made = object.__new__(type(self))
        own = made.__dict__
        own.update(self.__dict__)
        if len(own) > len(self.field_types):  # cached properties belong to the original
            for name in own.keys() - self.field_types.keys():
                del own[name]
        own.update(changes)
        return made
