"""What is hostile in names stays harmless in every format; what a terminal cannot show is not sent to it."""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys

import pytest
from report_answers import FakeModel, inference, too_large, training
from rich.text import Text

from memfit import api
from memfit.account.estimate import Estimate
from memfit.fit.answer import Answer
from memfit.job import Job, Parallelism
from memfit.report import to_csv, to_markdown, to_terminal
from memfit.report.csv import guard
from memfit.report.look import Look, look_of
from memfit.report.markdown import code, escape
from memfit.report.overview import overview_csv, overview_json, overview_markdown, overview_text
from memfit.report.rich_text import bullet, to_text
from memfit.report.terminal import render
from memfit.report.text import headline, layout_text, percent, plain, show_bytes, show_value


def named(name: str) -> Answer:
    base = training()
    job = Job(model=FakeModel(name=name), workload=base.job.workload, overheads=base.job.overheads, cluster=base.job.cluster)  # type: ignore[arg-type]
    return training(job=job)


HOSTILE = "a\x1b[2J\x1b]0;title\x07b\u202ec\ud800d\r\nFITS"


@pytest.mark.parametrize("make", [to_terminal, to_csv, to_markdown])
def test_no_control_character_of_a_name_reaches_the_output(make: object) -> None:
    text = make(named(HOSTILE))  # type: ignore[operator]
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e", "\ud800"}
    assert "\nFITS\n" not in text
    text.encode("utf-8")


def test_what_a_terminal_is_given_is_cleaned_whatever_it_was_made_from() -> None:
    for color in (False, True):
        text = to_text([Text(HOSTILE), bullet(HOSTILE, Look()), Text("ok", style="bold")], Look(color=color))
        assert "a?[2J" in text
        assert not set(text) & {"\x07", "\r", "\u202e", "\ud800"}
        assert ("\x1b" in text) == color  # only the colours' own
        assert text.count("\x1b[2J") == 0


def test_no_control_character_of_a_command_reaches_the_overview() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 8, "_name_or_path": HOSTILE}
    found = api.overview(config, "4090")
    assert "\x1b" in found.ways[0].command
    for text in (overview_text(found, Look()), overview_markdown(found), overview_csv(found)):
        assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}


def test_the_overview_shows_its_warnings_in_every_format() -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 1, "n_layer": 1, "vocab_size": 8}
    found = api.overview(config, "2x4090,m4-max-64")
    codes = [one["code"] for one in overview_json(found)["warnings"]]
    assert codes == ["other-runtime"]
    for text in (overview_text(found, Look(width=200)), overview_markdown(found)):
        assert text.count("on apple they differ") == 1


def test_an_assumption_without_a_flag_says_none() -> None:
    shown = [line for line in to_terminal(training()).splitlines() if "the config says so" in line]
    assert len(shown) == 1
    assert shown[0].endswith(" none")
    assert "| tie | no | the config says so | none |" in to_markdown(training())


def test_plain_keeps_other_alphabets() -> None:
    assert plain("模型 é") == "模型 é"


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_a_name_that_a_spreadsheet_would_run_is_written_as_text(start: str) -> None:
    rows = list(csv.reader(io.StringIO(to_csv(named(start + "cmd|' /C calc'!A0")))))
    assert {row[0] for row in rows[1:]} == {"'" + start + "cmd|' /C calc'!A0"}


def test_numbers_in_csv_are_not_touched() -> None:
    assert guard(-5) == -5
    assert guard("-5") == "'-5"


def test_csv_has_a_row_for_each_component_and_the_three_totals() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(training()))))
    assert len(rows) == 9 + 3
    totals = {row["component"]: int(row["bytes"]) for row in rows if row["component"].startswith("total_")}
    parts = sum(int(row["at_peak_bytes"]) for row in rows if not row["component"].startswith("total_"))
    assert totals["total_device"] == parts == 19 * 2**30
    allocated = sum(int(row["at_peak_bytes"]) for row in rows[:-3] if row["counted_in"] == "allocated")
    assert totals["total_allocated"] == allocated


def test_markdown_cells_cannot_end_their_column() -> None:
    assert code("a | b `c`") == "`a \\| b 'c'`"
    assert escape("[x](http://y) <b> @user a|b") == "\\[x\\](http://y) &lt;b&gt; &#64;user a\\|b"
    for line in to_markdown(training()).splitlines():
        if line.startswith("| ") and "foreach" in line:
            assert len(re.findall(r"(?<!\\)\|", line)) == 7


@pytest.mark.parametrize("answer", [training(), too_large(), inference()], ids=["fits", "no", "no device"])
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_lines_keep_to_the_width_and_ascii_is_ascii(answer: Answer, width: int) -> None:
    text = render(answer, Look(width=width, unicode=False))
    assert text.isascii()
    commands = {one.command for one in (*answer.verify, *answer.next)}  # these are never broken
    assert max(len(line) for line in text.splitlines() if line.strip() not in commands) <= width


@pytest.mark.parametrize("width", [40, 100])
def test_a_command_stays_on_one_line_however_long(width: int) -> None:
    workload = {"kind": "train", "ema": "device", "dropout": 0.1, "clip_grad": 1.0, "kernels": "compile", "optimizer": "sophia"}
    found = api.answer("7B", workload, on="8xh100", overheads={"runtime": "hf-trainer@4.57"})
    commands = [one.command for one in found.next]
    assert max(len(one) for one in commands) > 100
    lines = [line.strip() for line in render(found, Look(width=width)).splitlines()]
    assert set(commands) <= set(lines)
    lines = [line.strip(" •") for line in overview_text(api.overview("7B"), Look(width=width)).splitlines()]
    assert {way.command for way in api.overview("7B").ways if not way.why_not} <= set(lines)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_number_is_cut_off_by_a_narrow_terminal(width: int) -> None:
    text = render(too_large(), Look(width=width))
    for number in (
        "8.00 GiB",
        "64.00 MiB",
        "18.06 GiB",
        "18.50 GiB",
        "19.00 GiB",
        "3.00 GiB",
        "12.00 GiB",
        "6.00 GiB",
        "17.00 GiB",
    ):
        assert re.search(rf"(^| ){re.escape(number)}( |$)", text, re.MULTILINE), number


def test_meaning_does_not_need_colour() -> None:
    colour = render(too_large(), Look(color=True))
    without = re.sub(r"\x1b\[[0-9;]*m", "", colour)
    assert "\x1b[" in colour
    assert [line.rstrip() for line in without.splitlines()] == render(too_large(), Look()).splitlines()


def test_the_first_line_is_the_verdict() -> None:
    assert headline(training()) == "FITS: 19.00 of 24.00 GiB (79 %) on 1x Toy 24GB"
    assert headline(too_large()) == "DOES NOT FIT: short by 3.00 GiB on 1x Toy 16GB"
    assert headline(inference()) == "NEEDS 3.50 GiB on each device, at prefill; smallest GPUs that hold it: 1x toy-8, 1x toy-tpu"
    assert headline(inference(smallest_devices=())).endswith("; no single GPU of the catalogue holds it")


def test_the_first_screen_answers_the_question() -> None:
    screen = "\n".join(render(too_large(), Look()).splitlines()[:30])
    for part in ("DOES NOT FIT", "Smallest change that fits: 8-bit AdamW", "optimizer-step", "short by", "Limits", "seq"):
        assert part in screen


def test_it_says_so_when_no_change_helps() -> None:
    fused = too_large().recommendations[:1]
    assert "None of the changes that memfit tried makes it fit." in to_terminal(too_large(recommendations=fused))


def test_sources_are_shown_when_asked_for() -> None:
    assert "measured on one card" not in to_terminal(training())
    assert "source: measured on one card" in to_terminal(training(), explain=True)


def test_the_rank_that_binds_is_named_when_there_are_several() -> None:
    base = training()
    first = base.estimate.ranks[0]
    second = first.replace(rank="1", peak=first.peak.replace(device_bytes=first.peak.device_bytes - 1))
    assert "on rank 0" in to_terminal(training(estimate=Estimate(ranks=(second, first))))


def test_every_distinct_rank_is_shown_once_with_what_it_holds() -> None:
    base = training()
    first = base.estimate.ranks[0].replace(rank="pp0", holds="embedding, 8 layers")
    half = first.peak.replace(device_bytes=first.peak.device_bytes // 2)
    others = first.replace(rank="pp1-6", count=6, holds="48 layers", peak=half)
    answer = training(estimate=Estimate(ranks=(first, others)))
    shown = [line.split() for line in to_terminal(answer).splitlines() if line.strip().startswith("pp")]
    assert [line[0] for line in shown] == ["pp0", "pp1-6"]
    assert ["(worst)" in line for line in shown] == [True, False]
    assert shown[1][1:4] == ["6", "9.50", "GiB"]
    assert shown[1][-2:] == ["48", "layers"]
    assert "| **pp0** (worst) | 1 | 19.00 GiB | optimizer-step | embedding, 8 layers |" in to_markdown(answer)
    rows = list(csv.DictReader(io.StringIO(to_csv(answer))))
    assert [(row["rank"], row["count"]) for row in rows if row["component"] == "total_device"] == [("pp0", "1"), ("pp1-6", "6")]
    assert "Ranks" not in to_terminal(base)


def test_the_layout_of_several_devices_is_one_line() -> None:
    job = training().job
    spread = Parallelism(tp=8, pp=4, dp_shard=16, zero=3, sharding="fsdp2", sp=True, schedule="interleaved", virtual_stages=2)
    over = job.replace(workload=job.workload.replace(grad_accum=8), parallelism=spread)
    assert layout_text(over) == (
        "pp 4 x tp 8 x dp_shard 16 = 512 devices, sequence parallel, ZeRO-3 (fsdp2) over 16, "
        "interleaved of 2 chunks a stage over 8 micro-batches"
    )
    assert f"Layout: {layout_text(over)[:40]}" in to_terminal(training(job=over))
    assert "Layout: pp 4" in to_markdown(training(job=over))
    assert layout_text(job) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (512, "512 B"), (131_072, "128.00 KiB"), (64 << 20, "64.00 MiB"), (1 << 30, "1.00 GiB"), (-(1 << 31), "-2.00 GiB"),
     (3 << 29, "1.50 GiB")],
)  # fmt: skip
def test_sizes_are_readable_at_every_scale(number: int, text: str) -> None:
    assert show_bytes(number) == text


def test_small_words() -> None:
    assert [show_value(one) for one in (None, True, 8192, 0.5, "x")] == ["not set", "yes", "8,192", "0.5", "x"]
    assert [percent(1, 1000), percent(0, 10), percent(1, 2), percent(1, 0)] == ["<1 %", "0 %", "50 %", ""]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("not a real terminal")


@pytest.mark.parametrize(
    ("environ", "color", "expected"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour_on_a_terminal(environ: dict[str, str], color: bool, expected: bool) -> None:
    assert look_of(Terminal(), environ, color=color).color is expected


def test_no_colour_in_a_pipe_or_a_file() -> None:
    assert look_of(io.StringIO(), {"TERM": "xterm"}).color is False
    assert look_of(io.StringIO(), {"FORCE_COLOR": "1"}).color is True
    assert look_of(None, {"FORCE_COLOR": "1"}) == Look(width=100, color=False, unicode=True)


@pytest.mark.parametrize(("encoding", "unicode"), [("utf-8", True), ("UTF8", True), ("ascii", False), ("cp1252", False)])
def test_characters_beyond_ascii_only_in_utf_8(encoding: str, unicode: bool) -> None:
    assert look_of(Terminal(encoding), {}).unicode is unicode


@pytest.mark.parametrize(
    ("columns", "width"),
    [("120", 120), ("", 100), ("x", 100), ("0", 100), ("1", 60), ("99999", 400), ("²", 100), ("9" * 40, 100)],
)
def test_the_width_is_that_of_columns(columns: str, width: int) -> None:
    assert look_of(Terminal(), {"COLUMNS": columns}).width == width
    assert look_of(io.StringIO(), {"COLUMNS": columns}).width == width


def test_the_three_light_formats_do_not_import_rich() -> None:
    program = (
        "import sys; from report_answers import training; from memfit import report; a = training();"
        "report.to_json(a); report.to_csv(a); report.to_markdown(a); print('rich' in sys.modules)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    assert run.stdout.strip() == "False"
