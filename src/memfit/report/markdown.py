"""An answer as GitHub-flavoured Markdown, for issues and pull requests: a table, and the rest folded away. No colour codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memfit.report.text import (
    NOTICE,
    cluster_name,
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
    from memfit.fit.answer import Answer

_SPECIAL = str.maketrans({char: "\\" + char for char in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "@": "&#64;"})


def escape(text: object) -> str:
    """Text that Markdown shows as it is: no links, no mentions, no HTML, no column break."""
    return plain(text).translate(_SPECIAL)


def code(text: object, *, in_table: bool = True) -> str:
    """Text as inline code. In a table a pipe ends the cell even within code, unless it is escaped."""
    cleaned = plain(text).replace("`", "'")
    if in_table:
        cleaned = cleaned.replace("|", "\\|")
    return f"`{cleaned}`" if cleaned else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """A table of finished cells; `align` has `l` or `r` for each column."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---:" if side == "r" else "---" for side in align) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def details(title: str, body: str) -> str:
    """A part that is folded until it is opened."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def to_markdown(answer: Answer) -> str:
    """The verdict, the component table of the binding rank, recommendations; phases, limits and assumptions folded."""
    parts = [
        f"**{escape(headline(answer))}**",
        f"{escape(question(answer))}. Peak {show_bytes(answer.estimate.peak.device_bytes)}; {interval(answer)}.",
        _components(answer),
    ]
    if layout := layout_text(answer.job):
        parts.insert(2, f"Layout: {escape(layout)}.")
    parts += _warnings(answer)
    sections = (_ranks, _recommendations, _phases, _limits, _kernels, _assumptions, _rule, _steps)
    parts += [shown for section in sections if (shown := section(answer))]
    parts.append(f"<sub>memfit {version()}: {NOTICE}</sub>")
    return "\n\n".join(parts) + "\n"


def _components(answer: Answer) -> str:
    rank = answer.estimate.worst
    peak = rank.peak
    rows = [
        [component_name(one.name), show_bytes(one.bytes), show_bytes(one.at_peak_bytes),
         escape(percent(one.at_peak_bytes, peak.device_bytes)), one.basis, code(one.formula)]
        for one in rank.components
        if one.bytes
    ]  # fmt: skip
    for name, size in (("allocated", peak.allocated_bytes), ("reserved", peak.reserved_bytes), ("device", peak.device_bytes)):
        rows.append([f"**{name}**", "", f"**{show_bytes(size)}**", percent(size, peak.device_bytes), "", ""])
    if answer.job.cluster is not None:
        usable = answer.job.cluster.usable_bytes
        rows.append(["**usable**", "", f"**{show_bytes(usable)}**", "", "", escape(cluster_name(answer.job.cluster))])
    return table(["component", "largest", f"at the peak ({escape(peak.phase)})", "share", "basis", "formula"], rows, "lrrrll")


def _ranks(answer: Answer) -> str:
    ranks, worst = answer.estimate.ranks, answer.estimate.worst
    rows = [
        [f"**{escape(one.rank)}** (worst)" if one is worst else escape(one.rank), show_value(one.count),
         show_bytes(one.peak.device_bytes), escape(one.peak.phase), escape(one.holds)]
        for one in ranks
    ]  # fmt: skip
    return table(["rank", "devices", "peak", "at", "holds"], rows, "lrrll") if len(ranks) > 1 else ""


def _warnings(answer: Answer) -> list[str]:
    return ["\n".join(f"> **{escape(one.code)}**: {escape(one.text)}" for one in answer.warnings)] if answer.warnings else []


def _recommendations(answer: Answer) -> str:
    if not answer.recommendations:
        return ""
    rows = [
        [escape(one.change), show_bytes(one.peak_bytes), show_bytes(one.saves_bytes), fits_word(one.fits), escape(one.cost),
         code(flags_text(one))]
        for one in answer.recommendations
    ]  # fmt: skip
    return "**What would change it**\n\n" + table(["change", "peak", "saves", "fits", "cost", "flags"], rows, "lrrlll")


def _phases(answer: Answer) -> str:
    rows = [
        [escape(phase.name) + (" (first step)" if phase.first_step else ""), show_bytes(phase.allocated_bytes),
         ", ".join(f"{component_name(name)} {show_bytes(size)}" for name, size in phase.components.items() if size)]
        for phase in answer.estimate.worst.phases
    ]  # fmt: skip
    return details("Phases", table(["phase", "allocated", "made of"], rows, "lrl")) if rows else ""


def _limits(answer: Answer) -> str:
    rows = [
        [escape(name), "" if one.max is None else show_value(one.max), "" if one.likely is None else show_value(one.likely),
         show_bytes(one.fixed_bytes), show_bytes(one.bytes_per_unit), escape(limit_note(one))]
        for name, one in answer.limits.items()
    ]  # fmt: skip
    header = ["number", "largest that fits", "likely", "fixed", "per unit", "binds"]
    return details("Limits", table(header, rows, "lrrrrl")) if rows else ""


def _kernels(answer: Answer) -> str:
    rows = [[escape(one.computes), escape(one.name), escape(kernel_text(one))] for one in answer.kernels]
    return details("Kernels in force", table(["what", "kernel", "why"], rows, "lll")) if rows else ""


def _assumptions(answer: Answer) -> str:
    rows = [
        [escape(one.name), escape(show_value(one.value)), escape(one.why), code(one.flag) if one.flag else "none"]
        for one in answer.assumptions
    ]
    return details(f"Assumptions ({len(rows)})", table(["name", "value", "why", "flag"], rows, "llll")) if rows else ""


def _rule(answer: Answer) -> str:
    rule = answer.rule_of_thumb
    if rule is None:
        return ""
    text = f"{code(rule.formula, in_table=False)} = {show_bytes(rule.bytes)}. {escape(rule.differs_because)}"
    return details("Rule of thumb", text)


def _steps(answer: Answer) -> str:
    lines = [f"- {escape(one.why)}: {code(one.command, in_table=False)}" for one in (*answer.verify, *answer.next)]
    return details("Verify, and go on", "\n".join(lines)) if lines else ""
