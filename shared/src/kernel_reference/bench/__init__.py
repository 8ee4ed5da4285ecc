"""Benchmarks: measured roofs, timers, the JSONL record, the table, the SVG and the comparison of two records.

Importing this imports no torch, rich or matplotlib. Commands: ``python -m kernel_reference.bench.run``,
``python -m kernel_reference.bench.map``, ``python -m kernel_reference.bench.compare``,
``python -m kernel_reference.bench.demo``.
"""

from kernel_reference.bench.case import COPY, Call, Case, Requirement
from kernel_reference.bench.grid import Axis, Map, Point
from kernel_reference.bench.record import Record, load, save

__all__ = ["COPY", "Axis", "Call", "Case", "Map", "Point", "Record", "Requirement", "load", "save"]
