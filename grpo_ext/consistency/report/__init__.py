"""The dumps of a run as one self-contained page: `grpo-ext report DIR`. Knows nothing of torch; needs the extra `report`."""

import importlib
import logging
from pathlib import Path

from grpo_ext.consistency.report.read import DumpError, Problems, find_steps
from grpo_ext.files import replacing

__all__ = ["DumpError", "write_report"]

logger = logging.getLogger(__name__)


def write_report(
    directory: Path, output: Path, *, png: Path | None = None, warn: float = 0.005, stop: float | None = None
) -> list[Path]:
    """Write the page of a `prob_diff_save_dir` to `output`, and its figures to `png` if given; returns what was written.

    `warn` and `stop` are thresholds on a step's mean probability difference. Files that cannot be used are logged as warnings, listed
    on the page, and left out. Raises DumpError where no dump can be used, a library is missing, or a file cannot be written.
    """
    if not 0 < warn < (1 if stop is None else stop) <= 1:
        raise DumpError(f"warn {warn:g} and stop {stop} do not fit: 0 < warn < stop <= 1, as in --warn 0.005 --stop 0.01")
    if png is not None and png.absolute() == output.absolute():
        raise DumpError(f"page and picture cannot both be {output}: give --png another name, such as {output.stem}-figures.png")
    problems = Problems()
    files = find_steps(directory, problems)
    _need("plotly", "jinja2", *(["pyarrow"] if any(f.tokens for f in files) else []), *(["matplotlib"] if png else []))
    from grpo_ext.consistency.report.page import render
    from grpo_ext.consistency.report.run import Thresholds, read_run

    run = read_run(directory, files, problems, Thresholds(warn, stop))
    for line in problems.lines():
        logger.warning("%s", line)
    _write(output, render(run).encode())
    if png is None:
        return [output]
    from grpo_ext.consistency.report.png import draw

    _write(png, draw(run))
    return [output, png]


def _need(*libraries: str) -> None:
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise DumpError(f"a report needs {library} ({error}): pip install 'grpo-ext[report]'") from None


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_bytes(content)
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror or error}") from None
