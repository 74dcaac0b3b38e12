"""The commands about a model: infer, train, finetune and the overview."""

from __future__ import annotations

from typing import Any

from memfit.cli.output import Document
from memfit.cli.parser import Request
from memfit.errors import UsageError
from memfit.job import WORKLOADS, Dimensions, Hardware, Overheads, Parallelism
from memfit.report.look import Look


def answer(request: Request) -> Document:
    """Judge one workload: the whole answer."""
    from memfit import api

    model = _model(request)
    hardware = request.build(Hardware)
    found = api.answer(
        model,
        request.build(WORKLOADS[request.command.name]),
        on=hardware.on,
        headroom=hardware.headroom,
        overheads=request.build(Overheads),
        parallelism=request.build(Parallelism),
    )

    def table(look: Look, explain: bool) -> str:
        from memfit.report.terminal import render

        return render(found, look, explain)

    from memfit import report

    return Document(
        table=table,
        data=lambda: report.to_json(found),
        csv=lambda: report.to_csv(found),
        markdown=lambda: report.to_markdown(found),
    )


def overview(request: Request) -> Document:
    """Which ways of using the model fit on which devices."""
    from memfit import api
    from memfit.report import overview as report

    hardware = request.build(Hardware)
    model = _model(request)
    found = api.overview(model, hardware.on, headroom=hardware.headroom, overheads=request.build(Overheads))
    return Document(
        table=lambda look, explain: report.overview_text(found, look),
        data=lambda: report.overview_json(found),
        csv=lambda: report.overview_csv(found),
        markdown=lambda: report.overview_markdown(found),
    )


def _model(request: Request) -> Any:
    from memfit import api

    dimensions = request.build(Dimensions)
    if request.argument is None and not request.given(Dimensions):
        raise UsageError(
            f"MODEL is missing: name a preset, a Hub id, a config.json or a size, as in 'memfit {request.command.name} 7B'; "
            "or give --params, or --layers and --hidden"
        )
    return api.load_model(request.argument, dimensions=dimensions)
