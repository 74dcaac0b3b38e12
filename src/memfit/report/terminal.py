"""An answer in the terminal: the verdict first, then where the memory goes, then what to do. Made with rich, imported late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from memfit.report.look import Look
from memfit.report.rich_text import (
    VERDICT_STYLES,
    Column,
    CommandLine,
    bar,
    bullet,
    cell,
    heading,
    indented,
    table,
    to_text,
)
from memfit.report.text import (
    NOTICE,
    component_name,
    fits_word,
    flags_text,
    headline,
    interval,
    kernel_text,
    layout_text,
    limit_note,
    percent,
    plain,
    question,
    show_bytes,
    show_value,
    version,
)

if TYPE_CHECKING:
    from memfit.account.estimate import Rank
    from memfit.fit.answer import Answer

_NUMBERS = ("allocated", "reserved", "device")
_BAR_WIDTH = 8
_WIDE_ENOUGH_FOR_BARS = 92
_WIDE_ENOUGH_FOR_FORMULAS = 72
_WIDE_ENOUGH_FOR_REASONS = 80


def render(answer: Answer, look: Look, explain: bool = False) -> str:
    """The whole answer as text for a terminal of this look. `explain` adds the source of each formula."""
    return to_text(_parts(answer, look, explain), look)


def _parts(answer: Answer, look: Look, explain: bool) -> Iterator[RenderableType]:
    style = VERDICT_STYLES[answer.verdict.fits] if answer.verdict is not None else "bold"
    yield Text(headline(answer), style=style)
    yield from _first_lines(answer)
    for warning in answer.warnings:
        yield Text.assemble(("warning: ", "bold yellow"), plain(warning.text))
    yield Text("")
    yield from _components(answer, look, explain)
    for section in (_ranks, _limits, _recommendations, _phases, _kernels, _assumptions, _rule_of_thumb, _steps):
        yield from section(answer, look)
    yield Text("")
    yield Text(f"memfit {version()}: {NOTICE}", style="dim")


def _first_lines(answer: Answer) -> Iterator[RenderableType]:
    yield Text(question(answer))
    if layout := layout_text(answer.job):
        yield Text(f"Layout: {layout}")
    peak = answer.estimate.peak
    where = f" ({plain(peak.where)})" if peak.where else ""
    ranks = answer.estimate.ranks
    on_rank = f" on rank {plain(answer.estimate.worst.rank)}" if len(ranks) > 1 else ""
    yield Text(f"Peak {show_bytes(peak.device_bytes)} at {plain(peak.phase)}{where}{on_rank}; {interval(answer)}")
    if answer.job.cluster is not None and answer.job.cluster.reading:
        yield Text(f"Device: {plain(answer.job.cluster.reading)}")
    change = _smallest_change(answer)
    if change:
        yield Text(change)


def _smallest_change(answer: Answer) -> str:
    """One line on how to make it fit, when it does not."""
    if answer.verdict is None or answer.verdict.fits == "yes":
        return ""
    for one in answer.recommendations:
        if one.fits == "yes":
            return f"Smallest change that fits: {plain(one.change)}"
    return "None of the changes that memfit tried makes it fit." if answer.recommendations else ""


def _components(answer: Answer, look: Look, explain: bool) -> Iterator[RenderableType]:
    rank = answer.estimate.worst
    whole = rank.peak.device_bytes
    bars = look.width >= _WIDE_ENOUGH_FOR_BARS
    formulas = look.width >= _WIDE_ENOUGH_FOR_FORMULAS
    columns = [Column("component"), *(Column(title, number=True) for title in ("largest", "at the peak", "share"))]
    columns += [Column("")] if bars else []
    columns += [Column("basis")]
    columns += [Column("formula", wrap=True)] if formulas else []
    made = table(columns, look)
    shown = [one for one in rank.components if one.bytes or one.at_peak_bytes]
    for index, one in enumerate(shown):
        row = [cell(component_name(one.name)), cell(show_bytes(one.bytes)), cell(show_bytes(one.at_peak_bytes)),
               cell(percent(one.at_peak_bytes, whole))]  # fmt: skip
        row += [Text(bar(one.at_peak_bytes, whole, _BAR_WIDTH, look), style="cyan")] if bars else []
        row += [cell(one.basis)]
        if formulas:
            row.append(_formula(one.formula, one.source if explain else ""))
        made.add_row(*row, end_section=index == len(shown) - 1)
    padding = [cell("")] * bars
    for name, size, note in _totals(answer, rank):
        share = percent(size, whole) if name in _NUMBERS else ""
        row = [cell(name, "bold"), cell(""), cell(show_bytes(size), "bold"), cell(share), *padding, cell("")]
        made.add_row(*row, *([cell(note, "dim")] if formulas else []))
    yield made
    if not formulas:
        for one in shown:
            yield Text.assemble((component_name(one.name) + ": ", "bold"), _formula(one.formula, one.source if explain else ""))


def _formula(formula: str, source: str) -> Text:
    text = cell(formula)
    if source:
        text.append("\nsource: " + plain(source), style="dim")
    return text


def _totals(answer: Answer, rank: Rank) -> Iterator[tuple[str, int, str]]:
    """The three numbers, and what the device offers: `device` and `free` add up to `usable`."""
    peak = rank.peak
    yield "allocated", peak.allocated_bytes, "torch: max_memory_allocated"
    yield "reserved", peak.reserved_bytes, "torch: max_memory_reserved"
    yield "device", peak.device_bytes, "the process in nvidia-smi"
    cluster = answer.job.cluster
    if cluster is not None:
        free = cluster.usable_bytes - peak.device_bytes
        yield ("free" if free >= 0 else "short by"), abs(free), f"of {show_bytes(cluster.usable_bytes)} usable"


def _ranks(answer: Answer, look: Look) -> Iterator[RenderableType]:
    """Every distinct rank once, where there are several; the one whose components are shown above is marked."""
    ranks = answer.estimate.ranks
    if len(ranks) < 2:
        return
    yield Text("")
    yield heading("Ranks")
    worst = answer.estimate.worst
    wide = look.width >= _WIDE_ENOUGH_FOR_FORMULAS
    columns = [Column("rank"), Column("devices", number=True), Column("peak", number=True), Column("at")]
    made = table([*columns, Column("holds", wrap=True)] if wide else columns, look)
    for one in ranks:
        style = "bold" if one is worst else ""
        row = [cell(one.rank + (" (worst)" if one is worst else ""), style), cell(show_value(one.count)),
               cell(show_bytes(one.peak.device_bytes), style), cell(one.peak.phase)]  # fmt: skip
        made.add_row(*row, *([cell(one.holds)] if wide else []))
    yield indented(made)


def _limits(answer: Answer, look: Look) -> Iterator[RenderableType]:
    cache = answer.estimate.cache
    if not answer.limits and cache is None:
        return
    yield Text("")
    yield heading("Limits" if answer.job.cluster is not None else "Memory per unit")
    if answer.limits:
        wide = look.width >= _WIDE_ENOUGH_FOR_FORMULAS
        judged = answer.job.cluster is not None
        titles = ["largest", "likely"] if judged else []
        columns = [Column(""), *(Column(title, number=True) for title in (*titles, "fixed", "per unit"))]
        made = table([*columns, Column("binds at", wrap=True)] if wide else columns, look)
        for name, one in answer.limits.items():
            row = [cell(name)]
            row += [cell("" if value is None else show_value(value), "bold") for value in (one.max, one.likely)] if judged else []
            row += [cell(show_bytes(one.fixed_bytes)), cell(show_bytes(one.bytes_per_unit))]
            made.add_row(*row, *([cell(limit_note(one))] if wide else []))
        yield indented(made)
    if cache is not None:
        text = f"KV cache: {show_bytes(cache.bytes_per_token)} per token, {show_bytes(cache.bytes_per_sequence)} per sequence"
        if cache.pool_bytes is not None:
            text += f"; pool {show_bytes(cache.pool_bytes)}"
        if cache.pool_tokens is not None:
            text += f" for {cache.pool_tokens:,} tokens"
        yield indented(Text(text))


def _recommendations(answer: Answer, look: Look) -> Iterator[RenderableType]:
    if not answer.recommendations:
        return
    yield Text("")
    yield heading("What would change it")
    made = table([Column("fits"), Column("peak", number=True), Column("saves", number=True), Column("change", wrap=True)], look)
    styles = {"yes": "green", "tight": "yellow", "no": "red"}
    for one in answer.recommendations:
        words = cell(one.change, "bold")
        words.append(f"\ncosts: {plain(one.cost)}" if one.cost else "", style="not bold")
        words.append(f"\nflags: {flags_text(one)}" if one.flags else "", style="not bold dim")
        made.add_row(cell(fits_word(one.fits), styles.get(one.fits or "", "")), cell(show_bytes(one.peak_bytes)),
                     cell(show_bytes(one.saves_bytes)), words)  # fmt: skip
    yield indented(made)


def _phases(answer: Answer, look: Look) -> Iterator[RenderableType]:
    phases = answer.estimate.worst.phases
    if not phases:
        return
    yield Text("")
    yield heading("Phases (allocated)")
    largest = max(phase.allocated_bytes for phase in phases)
    wide = look.width >= _WIDE_ENOUGH_FOR_REASONS
    columns = [Column("phase"), Column("allocated", number=True), Column("")]
    made = table([*columns, Column("mostly", wrap=True)] if wide else columns, look)
    for phase in phases:
        top = sorted(phase.components.items(), key=lambda item: -item[1])[:3]
        mostly = ", ".join(f"{component_name(name)} {show_bytes(size)}" for name, size in top if size)
        row = [cell(phase.name + (" (first step)" if phase.first_step else "")), cell(show_bytes(phase.allocated_bytes)),
               Text(bar(phase.allocated_bytes, largest, _BAR_WIDTH, look), style="cyan")]  # fmt: skip
        made.add_row(*row, *([cell(mostly)] if wide else []))
    yield indented(made)


def _kernels(answer: Answer, look: Look) -> Iterator[RenderableType]:
    if not answer.kernels:
        return
    yield Text("")
    yield heading("Kernels in force")
    made = table([Column("what"), Column("kernel"), Column("why", wrap=True)], look)
    for one in answer.kernels:
        made.add_row(cell(one.computes), cell(one.name), cell(kernel_text(one)))
    yield indented(made)


def _assumptions(answer: Answer, look: Look) -> Iterator[RenderableType]:
    if not answer.assumptions:
        return
    yield Text("")
    yield heading("Assumptions (each with the flag that changes it)")
    if look.width >= _WIDE_ENOUGH_FOR_REASONS:
        made = table([Column("what"), Column("taken", wrap=True), Column("why", wrap=True), Column("flag")], look)
        for one in answer.assumptions:
            made.add_row(cell(one.name), cell(show_value(one.value)), cell(one.why), cell(one.flag or "none"))
    else:
        made = table([Column("what"), Column("taken, and why", wrap=True)], look)
        for one in answer.assumptions:
            flag = f" ({one.flag})" if one.flag else ""
            made.add_row(cell(one.name), cell(f"{show_value(one.value)}{flag}: {one.why}"))
    yield indented(made)


def _rule_of_thumb(answer: Answer, look: Look) -> Iterator[RenderableType]:
    rule = answer.rule_of_thumb
    if rule is None:
        return
    yield Text("")
    yield heading("Rule of thumb")
    yield indented(Text(f"{plain(rule.formula)} = {show_bytes(rule.bytes)}. {plain(rule.differs_because)}"))


def _steps(answer: Answer, look: Look) -> Iterator[RenderableType]:
    for title, steps in (("Verify on a real run", answer.verify), ("Next", answer.next)):
        if not steps:
            continue
        yield Text("")
        yield heading(title)
        for one in steps:
            yield indented(bullet(plain(one.why), look))
            yield CommandLine(one.command)
