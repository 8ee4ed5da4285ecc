"""An interface that was recorded stands in for its engine, and a class that does not fit it is found."""

from __future__ import annotations

import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from kernel_reference.testing import recorded
from kernel_reference.testing.recorded import Recording, as_text, installed, misfits, record, stand_in

LIMIT = 7


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Step:
    tokens: int
    causal: bool = True


class Backend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @classmethod
    def supports(cls, size: int, kind: str = "decoder") -> bool:
        return True

    @property
    def quantised(self) -> bool:
        return False

    @abstractmethod
    def forward(self, query: Any, *, out: Any, scale: Any = None) -> Any: ...


def attend(query: Any, *rest: Any, out: Any = None, **options: Any) -> None:
    raise AssertionError("the engine itself")


NAMES = ("LIMIT", "Level", "Step", "Backend", "attend")


@pytest.fixture
def recording() -> Recording:
    found = record({__name__: NAMES})[__name__]
    return {"an_engine.attention": found}


@pytest.fixture
def engine(recording: Recording) -> Iterator[Any]:
    with stand_in(recording):
        yield importlib.import_module("an_engine.attention")


def test_a_recording_survives_its_file_in_a_line_a_method(recording: Recording) -> None:
    text = as_text(recording)
    assert json.loads(text) == recording
    assert '    "get_name": {"how": "staticmethod", "abstract": true, "parameters": []},' in text.splitlines()


def test_what_stands_in_has_the_names_and_parameters_and_goes_when_it_is_over(recording: Recording) -> None:
    with stand_in(recording):
        engine = importlib.import_module("an_engine").attention
        assert (engine.LIMIT, engine.Step(3), [*engine.Level.__members__]) == (7, engine.Step(3, None), ["LOW", "HIGH"])
        assert engine.Backend.supports(3) is None
        with pytest.raises(TypeError, match="missing a required argument: 'size'"):
            engine.Backend.supports()
        with pytest.raises(TypeError, match="abstract"):
            engine.Backend()
        assert engine.attend(1, 2, 3, out=4, more=5) is None
        with pytest.raises(TypeError, match="missing a required argument: 'query'"):
            engine.attend(out=4)
        imported_meanwhile = importlib.import_module("wave")
    assert sys.modules["wave"] is imported_meanwhile
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("an_engine")


def test_a_file_is_read_as_it_was_recorded_and_recorded_again_as_it_was_read(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "an_engine-1.json"
    file.write_text(as_text({__name__: recording["an_engine.attention"]}))
    read = recorded.read(file)
    assert recorded.again(read) == read
    monkeypatch.setitem(globals(), "LIMIT", 8)
    assert recorded.again(read)[__name__]["LIMIT"] != read[__name__]["LIMIT"]


@pytest.mark.parametrize("has_engine", [False, True], ids=["recorded", "installed"])
def test_an_adapter_is_imported_inside_its_engine_or_what_was_recorded_of_it(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_engine: bool
) -> None:
    (tmp_path / "an_adapter.py").write_text("from an_engine.attention import LIMIT\n")
    monkeypatch.syspath_prepend(tmp_path)
    if has_engine:
        (tmp_path / "an_engine").mkdir()
        (tmp_path / "an_engine/attention.py").write_text("LIMIT = 9\n")
    with recorded.adapter("an_adapter", recording, has_engine) as module:
        assert (9 if has_engine else 7) == module.LIMIT
        assert sys.modules["an_adapter"] is module
    # What a stand-in leaves behind would hide that the engine is missing.
    assert ("an_adapter" in sys.modules) is has_engine
    for name in ("an_adapter", "an_engine", "an_engine.attention"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_class_that_can_be_called_as_recorded_fits_with_parameters_of_its_own(
    engine: Any, recording: Recording
) -> None:
    class Fits(engine.Backend):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return "ours"

        def forward(self, query: Any, *, out: Any, scale: Any = None, sinks: Any = None) -> Any:
            return out

    assert misfits(Fits, recording["an_engine.attention"]["Backend"]) == []


def test_what_does_not_fit_is_named(engine: Any, recording: Recording) -> None:
    class Misfit(engine.Backend):  # type: ignore[misc]
        @classmethod
        def supports(cls, size: int, kind: str) -> bool:
            return True

        quantised = False

        def forward(self, q: Any, *, out: Any, scale: Any = None) -> Any:
            return out

    assert misfits(Misfit, recording["an_engine.attention"]["Backend"]) == [
        "forward must be a method of ['self', 'query', ':out', ':scale='],"
        " is a method of ['self', 'q', ':out', ':scale=']",
        "get_name is missing",
        "quantised must be a property, is a bool",
        "supports must be a classmethod of ['cls', 'size', 'kind='], is a classmethod of ['cls', 'size', 'kind']",
    ]


def test_a_module_whose_parent_is_not_there_is_not_installed() -> None:
    assert installed("json.decoder")
    assert not installed("json.nothing")
    assert not installed("no_such_engine.attention")
