"""An engine's interface as it was recorded: what an adapter is tested against where the engine is not installed.

A recording is JSON: of modules the classes, functions and values that an adapter names, with their parameters, fields
and defaults' presence, and no code. :func:`record` makes it where the engine is; :func:`stand_in` makes modules of it
elsewhere, whose functions take what the engine's take and return None; :func:`adapter` imports an adapter inside them;
:func:`misfits` says where a class does not fit.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import os
import sys
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

Recording = dict[str, dict[str, Any]]

# By the kind of a parameter, what stands before its name. The longest mark first, for who reads it.
_MARKS = {"VAR_KEYWORD": "**", "VAR_POSITIONAL": "*", "KEYWORD_ONLY": ":"}
_HOW: dict[type, str] = {staticmethod: "staticmethod", classmethod: "classmethod", property: "property"}


def installed(module: str) -> bool:
    """Whether an engine's module is there: of some, only the kernels are on the path of a benchmark."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Of the parent.
        return False


def record(names: Mapping[str, Sequence[str]]) -> Recording:
    """What these modules have under these names.

    Args:
        names: by module, those of its classes, dataclasses, enums, functions and values.

    Returns:
        The recording; of a class the methods of its bases too.

    >>> record({"shutil": ["move"]})["shutil"]["move"]["parameters"]
    ['src', 'dst', 'copy_function=']
    """
    return {
        module: {name: _entry(getattr(importlib.import_module(module), name)) for name in own}
        for module, own in names.items()
    }


def again(recording: Recording) -> Recording:
    """What the engine has today under a recording's names, as the recording would be read: equal if nothing changed."""
    found: Recording = json.loads(as_text(record({module: list(names) for module, names in recording.items()})))
    return found


def read(file: str | os.PathLike[str]) -> Recording:
    """The recording in a file that was written with :func:`as_text`."""
    found: Recording = json.loads(Path(file).read_text())
    return found


def as_text(recording: Recording) -> str:
    """The recording as JSON, a line a method."""
    return _lines(recording, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    if not isinstance(value, dict) or not any(isinstance(part, dict) for part in value.values()):
        return json.dumps(value)
    parts = [f"{' ' * (depth + 1)}{json.dumps(name)}: {_lines(part, depth + 1)}" for name, part in value.items()]
    return "{\n" + ",\n".join(parts) + "\n" + " " * depth + "}"


def _entry(thing: Any) -> dict[str, Any]:
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return {"kind": "enum", "values": [member.name for member in thing]}
    if dataclasses.is_dataclass(thing) and isinstance(thing, type):
        return {"kind": "dataclass", "fields": [f"{one.name}{_default(one)}" for one in dataclasses.fields(thing)]}
    if isinstance(thing, type):
        return {"kind": "class", "methods": dict(sorted(_methods(thing)))}
    if inspect.isroutine(thing):
        return {"kind": "function", "parameters": _parameters(thing)}
    return {"kind": "value", "value": thing if isinstance(thing, bool | int | float | str | None) else repr(thing)}


def _default(one: dataclasses.Field[Any]) -> str:
    has_one = one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
    return "=" if has_one else ""


def _methods(cls: type) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _own(cls):
        raw = inspect.getattr_static(cls, name)
        function = _function_of(raw)
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("__")):
            abstract = {"abstract": True} if getattr(raw, "__isabstractmethod__", False) else {}
            yield name, {"how": _how(raw), **abstract, "parameters": _parameters(function)}


def _own(cls: type) -> set[str]:
    """Names that a class, or a base in its own module, defines."""
    return {name for base in cls.__mro__ if base.__module__ == cls.__module__ for name in vars(base)}


def _how(raw: Any) -> str:
    return _HOW.get(type(raw), "method")


def _function_of(raw: Any) -> Any:
    return getattr(raw, "__func__", getattr(raw, "fget", raw))


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names; with = behind those with a default, * and ** before those that take the rest, : before keywords alone."""
    return [
        f"{_MARKS.get(one.kind.name, '')}{one.name}{'' if one.default is one.empty else '='}"
        for one in inspect.signature(function).parameters.values()
    ]


@contextmanager
def stand_in(recording: Recording) -> Iterator[None]:
    """Have ``import`` find modules made of a recording, and not the engine's, until the ``with`` ends."""
    made: dict[str, ModuleType] = {}
    for path, entries in recording.items():
        parts = path.split(".")
        for number in range(1, len(parts) + 1):
            name = ".".join(parts[:number])
            made.setdefault(name, ModuleType(name))
            if number > 1:
                setattr(made[".".join(parts[: number - 1])], parts[number - 1], made[name])
        for name, entry in entries.items():
            setattr(made[path], name, _made(name, entry))
    # These alone: what else is imported meanwhile stays.
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def adapter(name: str, recording: Recording, has_engine: bool) -> Iterator[ModuleType]:
    """The module ``name``, which imports an engine: inside the engine if it ``has_engine``, else :func:`stand_in`.

    After a stand-in, whoever imports the module next finds that the engine is missing.
    """
    if has_engine:
        yield importlib.import_module(name)
        return
    with stand_in(recording):
        # One that an earlier import left is of another engine.
        sys.modules.pop(name, None)
        try:
            yield importlib.import_module(name)
        finally:
            sys.modules.pop(name, None)


def _made(name: str, entry: Mapping[str, Any]) -> Any:
    match entry["kind"]:
        case "enum":
            return enum.Enum(name, entry["values"])
        case "dataclass":
            fields = [(one.rstrip("="), Any, None) if one.endswith("=") else (one, Any) for one in entry["fields"]]
            return dataclasses.make_dataclass(name, fields)
        case "class":
            return type(name, (ABC,), {own: _method(own, one) for own, one in entry["methods"].items()})
        case "function":
            return _function(name, entry["parameters"])
    return entry["value"]


def _method(name: str, entry: Mapping[str, Any]) -> Any:
    function = _function(name, entry["parameters"])
    function.__isabstractmethod__ = entry.get("abstract", False)
    wrapped = {how: wrapper for wrapper, how in _HOW.items()}.get(entry["how"])
    return wrapped(function) if wrapped else function


def _function(name: str, parameters: Sequence[str]) -> Any:
    signature = inspect.Signature([_parameter(one) for one in parameters])

    def function(*given: Any, **options: Any) -> None:
        signature.bind(*given, **options)

    function.__name__ = name
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _parameter(text: str) -> inspect.Parameter:
    kind, mark = next(((kind, mark) for kind, mark in _MARKS.items() if text.startswith(mark)), ("", ""))
    default = None if text.endswith("=") else inspect.Parameter.empty
    name = text.removeprefix(mark).removesuffix("=")
    return inspect.Parameter(name, getattr(inspect.Parameter, kind or "POSITIONAL_OR_KEYWORD"), default=default)


def misfits(cls: type, entry: Mapping[str, Any]) -> list[str]:
    """Methods of ``cls`` that cannot be called as a recorded class's are, and abstract ones that it lacks; in words.

    A method fits if it is of the same sort and begins with the same parameters; what it has beyond them has defaults.
    """
    found = []
    for name, wanted in entry["methods"].items():
        if name not in _own(cls):
            if wanted.get("abstract"):
                found.append(f"{name} is missing")
            continue
        raw, parameters = inspect.getattr_static(cls, name), wanted["parameters"]
        if not inspect.isfunction(_function_of(raw)):
            found.append(f"{name} must be a {wanted['how']}, is a {type(raw).__name__}")
            continue
        own = _parameters(_function_of(raw))
        same = [one.rstrip("=") for one in own[: len(parameters)]] == [one.rstrip("=") for one in parameters]
        # A default that the engine counts on is one here too.
        kept = all(
            mine.endswith("=") or not theirs.endswith("=") for mine, theirs in zip(own, parameters, strict=False)
        )
        beyond = [one for one in own[len(parameters) :] if not one.endswith("=") and not one.startswith("*")]
        if _how(raw) != wanted["how"] or not same or not kept or beyond:
            found.append(f"{name} must be a {wanted['how']} of {parameters}, is a {_how(raw)} of {own}")
    return found
