"""The overview in every format: ways of using a model by devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.fit.command import device_word
from memfit.report.csv import write_rows
from memfit.report.look import Look
from memfit.report.markdown import code, escape, table
from memfit.report.payload import SCHEMA_VERSION
from memfit.report.text import NOTICE, VERDICT_WORDS, cluster_name, plain, show_bytes, version
from memfit.units import format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memfit.devices import Cluster
    from memfit.fit.overview import Cell, Overview, Way

_PEAK_WIDTH = len("1,234.56 GiB") + 4
_SHORT_WORDS = {"yes": "fits", "tight": "tight", "no": "no"}


def overview_json(overview: Overview) -> dict[str, Any]:
    """The matrix as one object; the cells of a way are in the order of `devices`."""
    model = overview.model
    return {
        "schema_version": SCHEMA_VERSION,
        "memfit_version": version(),
        "notice": NOTICE,
        "model": {"name": model.name, "family": model.family, "parameters": model.num_parameters, "source": model.source},
        "headroom": overview.headroom,
        "devices": [
            {
                "name": one.device.title,
                "id": one.device.id,
                "count": one.count,
                "marketed_bytes": one.device.marketed_bytes,
                "usable_bytes": one.usable_bytes,
                "reading": one.reading,
            }
            for one in overview.clusters
        ],
        "ways": [_way(way, overview.clusters) for way in overview.ways],
        "warnings": [{"code": one.code, "text": one.text} for one in overview.warnings],
    }


def _way(way: Way, clusters: tuple[Cluster, ...]) -> dict[str, Any]:
    return {
        "name": way.name,
        "note": way.note,
        "command": way.command,
        "why_not": way.why_not or None,
        "cells": [
            {"device": cluster.device.id, "count": cluster.count, "fits": cell.fits, "peak_bytes": cell.peak_bytes,
             "phase": cell.phase, "layout": cell.layout, "devices": cell.devices}
            for cluster, cell in zip(clusters, way.cells, strict=False)
        ],
    }  # fmt: skip


def overview_csv(overview: Overview) -> str:
    """One row for each way and device."""
    rows: list[tuple[Any, ...]] = []
    for way in overview.ways:
        if not way.cells:
            rows.append((overview.model.name, way.name, None, None, None, None, None, way.why_not, None, None))
        for cluster, cell in zip(overview.clusters, way.cells, strict=False):
            rows.append((overview.model.name, way.name, cluster.device.id, cluster.count, cluster.usable_bytes, cell.fits,
                         cell.peak_bytes, cell.phase, cell.layout, cell.devices))  # fmt: skip
    header = ("model", "way", "device", "count", "usable_bytes", "fits", "peak_bytes", "phase", "layout", "devices")
    return write_rows(header, rows)


def overview_markdown(overview: Overview) -> str:
    """The matrix, and the command that answers each way in full."""
    header = ["way", "peak", *(escape(cluster_name(one)) for one in overview.clusters), "numbers", "command"]
    rows = []
    for way in overview.ways:
        peak = show_bytes(way.peak_bytes) if way.peak_bytes is not None else ""
        words = [_short(cell) for cell in way.cells] or ["not possible"] * len(overview.clusters)
        note = way.why_not or way.note
        rows.append([escape(way.name), peak, *words, escape(note), code(_command(way, overview))])
    title = f"**{escape(headline(overview))}**"
    align = "lr" + "l" * (len(overview.clusters) + 2)
    warned = "\n".join(f"> **{escape(one.code)}**: {escape(one.text)}" for one in overview.warnings)
    parts = [title, table(header, rows, align), warned, f"<sub>memfit {version()}: {NOTICE}</sub>"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _short(cell: Cell) -> str:
    """A cell of the matrix: `fits`, `tight`, or how many devices of the column would do: `4x`."""
    return f"{cell.devices}x" if cell.fits == "no" and cell.devices else _SHORT_WORDS[cell.fits]


def _numbers(way: Way, cell: Cell) -> str:
    """The numbers of a way, how it is spread, and how many devices would do."""
    more = f"fits on {cell.devices:,} of them" if cell.fits != "yes" and cell.devices else ""
    return "; ".join(part for part in (way.note, cell.layout, more) if part)


def headline(overview: Overview) -> str:
    """For one device the answer in one line; for several, what the matrix is about."""
    model = f"{plain(overview.model.name, 120)} ({format_count(overview.model.num_parameters)} parameters)"
    if len(overview.clusters) != 1:
        return f"{model} on {len(overview.clusters)} kinds of device"
    cluster = overview.clusters[0]
    where = f"{cluster_name(cluster)} ({show_bytes(cluster.usable_bytes)} usable)"
    said = []
    for fits, word in VERDICT_WORDS.items():
        names = [way.name.replace(", ", " ") for way in overview.ways if way.cells and way.cells[0].fits == fits]
        if names:
            said.append(f"{word}: {', '.join(names)}")
    return f"{model} on {where}. {'; '.join(said) or 'no way of using it is known'}"


def overview_text(overview: Overview, look: Look) -> str:
    """The matrix for a terminal of this look."""
    from memfit.report.rich_text import to_text

    return to_text(_parts(overview, look), look)


def _parts(overview: Overview, look: Look) -> Iterator[RenderableType]:
    from rich.text import Text

    from memfit.report.rich_text import CommandLine, heading

    yield Text(headline(overview), style="bold")
    if len(overview.clusters) == 1 and overview.clusters[0].reading:
        yield Text(f"Device: {plain(overview.clusters[0].reading)}")
    yield Text("")
    yield from _matrices(overview, look)
    yield Text("")
    first = "" if len(overview.clusters) == 1 else "The peak is that on the first device; "
    yield Text(f"{first}fits: with {overview.headroom * 100:g} % free (--headroom); tight: it may fit, without that margin")
    if len(overview.clusters) > 1 and any(cell.devices and cell.fits == "no" for way in overview.ways for cell in way.cells):
        yield Text("4x: fits on 4 of them, training split by FSDP, inference by tensor parallelism and stages")
    impossible = [way for way in overview.ways if way.why_not]
    for way in impossible:
        yield Text(f"{way.name}: {plain(way.why_not)}")
    for warning in overview.warnings:
        yield Text.assemble(("warning: ", "bold yellow"), plain(warning.text))
    yield Text("")
    yield heading("In full, with limits and what would change it")
    for way in overview.ways:
        if not way.why_not:
            yield CommandLine(_command(way, overview), "  • " if look.unicode else "  - ")
    yield Text("")
    yield Text(f"memfit {version()}: {NOTICE}", style="dim")


def _command(way: Way, overview: Overview) -> str:
    """The way's command, for the device that was asked about if there is one alone."""
    if len(overview.clusters) != 1:
        return way.command
    cluster = overview.clusters[0]
    return f"{way.command} --on {device_word(cluster.device.id, cluster.count)}"


def _matrices(overview: Overview, look: Look) -> Iterator[RenderableType]:
    """The matrix, in as many parts as the width demands: a column of devices is never cut off."""
    from rich.text import Text

    if len(overview.clusters) == 1:
        yield _matrix(overview, look, [0])
        return
    free = look.width - max(len(way.name) for way in overview.ways) - _PEAK_WIDTH
    parts: list[list[int]] = [[]]
    used = 0
    for index, cluster in enumerate(overview.clusters):
        width = _column_width(cluster) + 2
        if parts[-1] and used + width > free:
            parts.append([])
            used = 0
        parts[-1].append(index)
        used += width
    for number, part in enumerate(parts):
        if number:
            yield Text("")
        yield _matrix(overview, look, part)


def _column_width(cluster: Cluster) -> int:
    """The longest word of a column; `tight` is one of them."""
    return max(5, *(len(word) for word in _device_heading(cluster).split()))


def _matrix(overview: Overview, look: Look, part: list[int]) -> RenderableType:
    from memfit.report.rich_text import VERDICT_STYLES, Column, cell, table

    single = len(overview.clusters) == 1
    columns = [Column("way"), Column("peak", number=True)]
    if single:
        columns += [Column("verdict"), Column("free", number=True), Column("binds at"), Column("numbers", wrap=True)]
    else:
        clusters = [overview.clusters[index] for index in part]
        columns += [Column(_device_heading(one), wrap=True, narrowest=_column_width(one)) for one in clusters]
    made = table(columns, look)
    for way in overview.ways:
        peak = show_bytes(way.peak_bytes) if way.peak_bytes is not None else ""
        row = [cell(way.name), cell(peak)]
        if single and way.cells:
            one = way.cells[0]
            free = overview.clusters[0].usable_bytes - one.peak_bytes
            verdict = cell(VERDICT_WORDS[one.fits], VERDICT_STYLES[one.fits])
            row += [verdict, cell(show_bytes(free)), cell(one.phase), cell(_numbers(way, one))]
        elif way.cells:
            chosen = [way.cells[index] for index in part]
            row += [cell(_short(one), VERDICT_STYLES[one.fits]) for one in chosen]
        else:
            row += [cell("-")] * (len(columns) - 2)
        made.add_row(*row)
    return made


def _device_heading(cluster: Cluster) -> str:
    """`rtx 4090`, in words that may stand below each other; with its count if there is more than one."""
    words = plain(cluster.device.id).replace("-", " ")
    return f"{cluster.count}x {words}" if cluster.count > 1 else words
