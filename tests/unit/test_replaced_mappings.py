# SPDX-License-Identifier: Apache-2.0
"""Queued mappings of which later ones replace all are not applied; nothing differs by it."""

from __future__ import annotations

import random

import pytest

from sonde._native import MmapEvent
from sonde.resolve import process_image
from sonde.resolve.mappings import AddressSpace, Mapping
from sonde.resolve.process_image import ProcessImage

PID = 500_000_000


def mapped(number: int, page: int, pages: int) -> MmapEvent:
    file = (8, 1, number) if number % 3 else (0, 0, 0)
    path = f"/lib/{number}" if number % 3 else "//anon"
    return MmapEvent(number, PID, PID, page << 12, pages << 12, number << 12, file, path)


def one_by_one(events: list[MmapEvent]) -> AddressSpace:
    space = AddressSpace()
    for it in events:
        end = it.address + it.length
        space.add(Mapping(it.address, end, it.file_offset, it.file, it.path))
    return space


def in_image(events: list[MmapEvent]) -> AddressSpace:
    image = ProcessImage(PID, "exec")
    for event in events:
        image.add(event)
    return image.space()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_there_in_the_end_is_the_same(seed: int) -> None:
    dice = random.Random(seed)
    events = [mapped(n, dice.randrange(40), dice.randrange(1, 12)) for n in range(300)]
    found, wanted = in_image(events), one_by_one(events)
    assert list(map(repr, found.mappings)) == list(map(repr, wanted.mappings))
    assert found.size == wanted.size


def test_memory_that_is_mapped_again_and_again_is_applied_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied = []
    real = process_image._mapping

    def counted(event: MmapEvent) -> Mapping:
        applied.append(event)
        return real(event)

    monkeypatch.setattr(process_image, "_mapping", counted)
    space = in_image([mapped(n, n % 100, 1 + n // 100) for n in range(3_000)])
    assert len(applied) < 250
    assert space.mappings[-1].end == (99 + 30) << 12
