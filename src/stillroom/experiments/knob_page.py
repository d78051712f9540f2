"""A page of a knob experiment: dose and response, and the curves of a calibration. One file, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stillroom.experiments.knob_report import ACCURACY, Done, accuracies
from stillroom.records import write_atomically
from stillroom.types import Estimate

CURVES = {
    "utility/mean": "utility of the training completions",
    "calibration/log_ratio": "calibration reward (nats per token)",
    "kl": "KL to the original (nats per token, k3)",
    "completions/mean_length": "length (tokens)",
}


def write_page(
    folder: Path,
    done: Sequence[Done],
    figures: Mapping[str, Estimate],
    metrics: Sequence[Mapping[str, Any]],
    method: str,
) -> Path:
    """Write ``knob.html``.

    Args:
        folder: where to.
        done: cells.
        figures: from `figures_of`.
        metrics: log lines of one calibration.
        method: of the students that are shown.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ["What students learn from each teacher", "Dose and response", *CURVES.values()]
    page = make_subplots(rows=3, cols=2, subplot_titles=titles, vertical_spacing=0.1)
    teachers = [n.split("/")[1] for n in figures if n.startswith("student/") and n.endswith(f"/{method}")]
    means = [figures[f"student/{t}/{method}"] for t in teachers]
    page.add_trace(
        go.Bar(
            x=teachers,
            y=[m.value for m in means],
            error_y={
                "type": "data",
                "array": [m.high - m.value for m in means],
                "arrayminus": [m.value - m.low for m in means],
            },
            name="sampled accuracy, 95 % over seeds",
        ),
        row=1,
        col=1,
    )
    if "undistilled" in figures:
        where: dict[str, Any] = {"row": 1, "col": 1}
        page.add_hline(figures["undistilled"].value, line_dash="dot", annotation_text="undistilled", **where)
    doses = {d.teacher: d.figures["kl_nats_per_token"] for d in done if d.kind == "teacher"} | {
        "original": 0.0
    }
    for teacher, kl in doses.items():
        values = list(accuracies(done, teacher, method, ACCURACY).values())
        page.add_trace(go.Scatter(x=[kl] * len(values), y=values, mode="markers", name=teacher), row=1, col=2)
    page.update_xaxes(title_text="KL(calibrated‖original), nats per token", row=1, col=2)
    page.update_yaxes(title_text="student's sampled accuracy", row=1, col=2)
    for place, key in enumerate(CURVES):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        page.add_trace(
            go.Scatter(x=[s for s, _ in points], y=[v for _, v in points], name=key, showlegend=False),
            row=2 + place // 2,
            col=1 + place % 2,
        )
    page.update_layout(title_text="Stillroom: the knob", height=1100, template="plotly_white")
    file = folder / "knob.html"
    write_atomically(file, page.to_html(include_plotlyjs=True, full_html=True))
    return file
