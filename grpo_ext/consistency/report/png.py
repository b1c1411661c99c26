"""The page's figures as one picture, for a README or a message: the run, and its step with the highest mean."""

import io

import numpy as np

from grpo_ext.consistency.report.run import Run, verdict
from grpo_ext.consistency.report.summary import FLOOR, UNSCORED, bin_edges, decode

_COLORS = {"mean": "#0b68cb", "p99": "#7a5cc0", "max": "#9aa1ab", "warn": "#c77700", "stop": "#c62a2f", "healthy": "#18794e"}


def draw(run: Run) -> bytes:
    """A PNG of 1500 x 1000 pixels."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    step = run.steps[run.worst_step]
    rows, positions = (max(n, 1) for n in step.shape)
    figure = Figure(figsize=(12, 8), dpi=125, layout="constrained")
    (trend, histogram), (picture, by_position) = figure.subplots(2, 2)
    level, sentence = verdict(run.steps, run.thresholds)
    figure.suptitle(f"Rollout against actor: {sentence}", color=_COLORS.get(level, "black"), fontsize=13, wrap=True)

    numbers = [s.step for s in run.steps]
    values = {"max": [s.maximum for s in run.steps], "p99": [s.p99 for s in run.steps], "mean": [s.mean for s in run.steps]}
    for width, (name, column) in enumerate(values.items(), start=1):
        drawn = [np.nan if value is None else max(value, FLOOR) for value in column]
        marker = "o" if len(numbers) <= 60 else None
        trend.plot(numbers, drawn, label=name, color=_COLORS[name], linewidth=0.7 * width, marker=marker, markersize=3)
    for name, limit in (("warn", run.thresholds.warn), ("stop", run.thresholds.stop)):
        if limit is not None:
            trend.axhline(limit, color=_COLORS[name], linestyle="--", label=f"{name} {limit:g}")
    trend.set(title="Over the run", xlabel="step", ylabel="probability difference", yscale="log")
    trend.xaxis.set_major_locator(MaxNLocator(integer=True) if len(numbers) > 12 else FixedLocator(numbers))
    trend.legend(fontsize=8)

    edges = bin_edges()
    below = edges[0] * edges[0] / edges[1]  # one more bin to the left: below FLOOR, or 0
    drawn = np.maximum(step.histogram, 0.1)  # an empty bin ends below the axis: a log scale has no 0
    histogram.stairs(drawn, [below, *edges], baseline=0.1, fill=True, color=_COLORS["mean"])
    histogram.axvline(run.thresholds.warn, color=_COLORS["warn"], linestyle="--")
    histogram.set(title=f"Step {step.step}: how the differences are spread", xscale="log", yscale="log")
    histogram.set(xlabel="probability difference", ylabel="tokens", ylim=(0.7, 2 * max(step.histogram.max(), 1)))

    extent = (-0.5, step.cells.shape[1] * step.block[1] - 0.5, step.cells.shape[0] * step.block[0] - 0.5, -0.5)
    picture.set(title=f"Step {step.step}: samples and positions", xlabel="position in the completion", ylabel="sample")
    picture.set_facecolor("#eef0f3")
    if step.cells.size:
        shown = {"extent": extent, "aspect": "auto", "interpolation": "nearest"}
        image = picture.imshow(decode(step.cells), cmap="viridis", vmin=-8, vmax=0, **shown)
        picture.imshow(np.where(step.cells == UNSCORED, 1.0, np.nan), cmap=ListedColormap(["#e5488f"]), **shown)
        figure.colorbar(image, ax=picture, label="log10 of the largest difference")
    picture.set(xlim=(-0.5, positions - 0.5), ylim=(rows - 0.5, -0.5))

    columns = np.arange(len(step.position_mean) + 1) * step.block[1] - 0.5
    by_position.stairs(np.maximum(step.position_mean, FLOOR), columns, baseline=None, color=_COLORS["mean"], linewidth=1.5)
    by_position.set(title=f"Step {step.step}: mean by position", xlabel="position in the completion", yscale="log")
    by_position.set(ylabel="probability difference", xlim=(-0.5, positions - 0.5))
    for axis in (picture.xaxis, picture.yaxis, by_position.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for axes in (trend, histogram, by_position):
        axes.grid(alpha=0.3)

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
