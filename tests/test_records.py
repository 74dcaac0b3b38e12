"""Frozen records: copies with other values."""

from __future__ import annotations

from functools import cached_property

import pytest

from memfit.records import Record


class Box(Record):
    width: int
    height: int = 2

    @cached_property
    def area(self) -> int:
        return self.width * self.height


def test_a_copy_computes_its_own_properties() -> None:
    box = Box(width=3)
    assert box.area == 6
    wider = box.replace(width=5)
    assert (wider.area, box.area) == (10, 6)
    assert wider == Box(width=5, height=2)
    assert wider.replace() == wider is not wider.replace()


def test_a_copy_takes_known_fields_only() -> None:
    with pytest.raises(TypeError, match="unexpected depth"):
        Box(width=3).replace(depth=1)
    with pytest.raises(AttributeError, match="frozen"):
        Box(width=3).replace(height=1).height = 4  # type: ignore[misc]
