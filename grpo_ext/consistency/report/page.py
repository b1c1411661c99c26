"""The page: one HTML file with its data, style and plotly.js inside. Nothing is loaded from anywhere."""

import base64
import secrets
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from grpo_ext.consistency.report.run import Run, verdict
from grpo_ext.consistency.report.summary import BINS_PER_DECADE, DECADES, FLOOR, StepSummary, WorstToken


def render(run: Run) -> str:
    """The whole page."""
    from jinja2 import Environment, FunctionLoader
    from plotly.offline import get_plotlyjs

    # autoescape covers what stands in the HTML, `tojson` (which escapes <, > and &) what stands in the script block.
    parts = files(__package__)
    environment = Environment(loader=FunctionLoader(lambda name: (parts / name).read_text(encoding="utf-8")), autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    level, sentence = verdict(run.steps, run.thresholds)
    return environment.get_template("page.html").render(
        directory=str(run.directory.absolute()),
        level=level,
        verdict=sentence,
        steps=run.steps,
        tokens=sum(step.tokens for step in run.steps),
        unscored=sum(step.unscored for step in run.steps),
        problems=run.problems.lines(),
        thresholds=run.thresholds,
        floor=FLOOR,
        data=page_data(run),
        plotly=get_plotlyjs(),
        nonce=secrets.token_urlsafe(16),
    )


def page_data(run: Run) -> dict[str, Any]:
    """What page.js draws, ready for JSON."""
    return {
        "warn": run.thresholds.warn,
        "stop": run.thresholds.stop,
        "floor": FLOOR,
        "decades": DECADES,
        "bins_per_decade": BINS_PER_DECADE,
        "first": run.worst_step,
        "steps": [_step_data(run, step) for step in run.steps],
        "worst": [_token_data(run, token) for token in run.worst],
    }


def _step_data(run: Run, step: StepSummary) -> dict[str, Any]:
    return {
        "step": step.step,
        "shape": step.shape,
        "tokens": step.tokens,
        "unscored": step.unscored,
        "mean": step.mean,
        "p99": step.p99,
        "max": step.maximum,
        "block": step.block,
        "size": step.cells.shape,
        "cells": _base64(step.cells),
        "position_mean": _base64(step.position_mean.astype("<f4")),
        "histogram": step.histogram.tolist(),
        "has_text": step.step in run.facts,
        "worst": [_token_data(run, token) for token in step.worst],
    }


def _token_data(run: Run, token: WorstToken) -> dict[str, Any]:
    facts = run.facts.get(token.step, {}).get((token.sample, token.position))
    return {**asdict(token), **({} if facts is None else asdict(facts))}


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
