"""What is written: complete pages under their name or none, hostile text made harmless, and no request to anywhere."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import grpo_ext.consistency.report as package
from grpo_ext.consistency.report import DumpError, write_report
from grpo_ext.consistency.report.summary import encode
from tests.report.dumps import write_dump, write_tokens

HOSTILE = ["</script><script>window.hacked=1</script>", "<!--<script>", "<img src=x onerror=hacked=1>", "\u2028'\"&{{7*7}}"]


class Page(HTMLParser):
    """The tags of a page, its text outside scripts, and the data inside."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.data, self._inside = [], "", "", None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = (tag, dict(attributes).get("id"))

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == ("script", "data"):
            self.data += data
        elif self._inside is None or self._inside[0] not in ("script", "style"):
            self.text += data


@pytest.fixture
def dumps(tmp_path):
    directory = tmp_path / "dumps"
    directory.mkdir()
    write_dump(directory, 3, [[0.25, 0.0], [np.nan, 0.001]])
    write_dump(directory, 12, [[1e-7, 0.5]], [[1, 0]])
    return directory


def test_the_page_carries_its_data(dumps, tmp_path):
    write_tokens(dumps, 3, {(0, 0): "a", (0, 1): "b", (1, 0): "c", (1, 1): " d"})
    page = tmp_path / "deep" / "report.html"
    assert write_report(dumps, page, warn=0.01, stop=0.2) == [page]
    data = json.loads(Page(page).data)
    assert (data["warn"], data["stop"], data["first"]) == (0.01, 0.2, 0)
    first, second = data["steps"]
    assert (first["step"], first["tokens"], first["unscored"], first["max"], first["has_text"]) == (3, 3, 1, 0.25, True)
    assert list(base64.b64decode(first["cells"])) == [encode(np.array(0.25)), 1, 255, encode(np.array(0.001))]
    assert [(t["sample"], t["position"], t["text"]) for t in first["worst"]] == [(0, 0, "a"), (1, 1, "␣d")]
    assert (first["worst"][0]["rollout"], first["worst"][0]["actor"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert second["has_text"] is False and "text" not in second["worst"][0]
    assert "1 of 2 steps above 0.01, first at step 3" in Page(page).text


def test_problems_are_on_the_page_and_in_the_log(dumps, tmp_path, caplog):
    (dumps / "prob_diff_step_4.npy").touch()
    write_report(dumps, tmp_path / "report.html")
    line = "prob_diff_step_4.npy: step left out: the file is empty"
    assert line in Page(tmp_path / "report.html").text
    assert [record.getMessage() for record in caplog.records] == [line]


def test_hostile_text_stays_text(tmp_path):
    directory = tmp_path / "<script>hacked=1<"
    directory.mkdir()
    write_dump(directory, 1, [[0.5, 0.4, 0.3, 0.2]])
    write_tokens(directory, 1, {(0, i): text for i, text in enumerate(HOSTILE)})
    (directory / "prob_diff_step_<img src=x>.npy").touch()
    write_report(directory, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in page.tags]
    assert [token["text"] for token in json.loads(page.data)["worst"]] == [
        "</script><script>window.hacked=1</script>",
        "<!--<script>",
        "<img␣src=x␣onerror=hacked=1>",
        "\\u2028'\"&{{7*7}}",
    ]
    assert "<script>hacked=1<" in page.text and "prob_diff_step_<img src=x>.npy" in page.text


def test_nothing_is_loaded_from_anywhere(dumps, tmp_path):
    write_report(dumps, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert not [(tag, a) for tag, a in page.tags if "src" in a or tag in ("link", "iframe", "object", "base")]
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert all(a["nonce"] in policy for tag, a in page.tags if tag == "script")


def test_the_picture(dumps, tmp_path):
    written = write_report(dumps, tmp_path / "report.html", png=tmp_path / "report.png")
    assert written == [tmp_path / "report.html", tmp_path / "report.png"]
    content = (tmp_path / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG") and content[16:24] == bytes.fromhex("000005dc000003e8")  # 1500 x 1000


@pytest.mark.parametrize(
    "diff, mask", [([[0.5]], [[0]]), ([[np.nan, np.nan]], None), (np.zeros((0, 3)), None), ([[0.0]], None)]
)
def test_a_step_with_nothing_in_it(tmp_path, diff, mask):
    write_dump(tmp_path, 1, diff, mask)
    write_report(tmp_path, tmp_path / "report.html", png=tmp_path / "report.png")
    assert json.loads(Page(tmp_path / "report.html").data)["steps"][0]["worst"] == []


def test_what_was_there_stays_if_writing_fails(dumps, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    page.write_text("the old page")

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(page), "write_bytes", full)
    with pytest.raises(DumpError, match=r"cannot write .*report\.html: No space left"):
        write_report(dumps, page)
    assert page.read_text() == "the old page"
    assert sorted(os.listdir(tmp_path)) == ["dumps", "report.html"]


def test_a_place_that_cannot_be_written(dumps, tmp_path):
    (tmp_path / "file").touch()
    for page in (tmp_path / "file" / "report.html", tmp_path):
        with pytest.raises(DumpError, match="cannot write"):
            write_report(dumps, page)


@pytest.mark.parametrize(
    "warn, stop",
    [(0, None), (-1, None), (0.005, 0.005), (0.01, 0.005), (float("nan"), None), (0.005, 0.0), (0.005, float("inf"))],
)
def test_thresholds_that_do_not_fit(dumps, tmp_path, warn, stop):
    with pytest.raises(DumpError, match=r"--warn 0\.005 --stop 0\.01"):
        write_report(dumps, tmp_path / "report.html", warn=warn, stop=stop)


def test_one_file_for_page_and_picture(dumps, tmp_path):
    with pytest.raises(DumpError, match=r"another name, such as report-figures\.png"):
        write_report(dumps, tmp_path / "report.html", png=tmp_path / "report.html")


@pytest.mark.parametrize("library", ["plotly", "jinja2", "pyarrow", "matplotlib"])
def test_a_missing_library_names_the_extra(dumps, tmp_path, monkeypatch, library):
    write_tokens(dumps, 3, {(0, 0): "a"})
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DumpError, match=rf"needs {library} .*pip install 'grpo-ext\[report\]'"):
        write_report(dumps, tmp_path / "report.html", png=tmp_path / "report.png")


def test_bare_arrays_need_neither_pyarrow_nor_matplotlib(dumps, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_report(dumps, tmp_path / "report.html")


def test_hundreds_of_steps_keep_the_page_small(tmp_path):
    rng = np.random.default_rng(0)
    for step in range(300):
        write_dump(tmp_path, step, 10 ** rng.uniform(-9, -2, (128, 512)))
    write_report(tmp_path, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 25e6


def grpo_ext(*arguments):
    return subprocess.run([sys.executable, "-m", "grpo_ext", "report", *map(str, arguments)], capture_output=True, text=True)


def test_the_command(dumps, tmp_path):
    (dumps / "prob_diff_step_4.npy").touch()
    page, picture = tmp_path / "r.html", tmp_path / "r.png"
    done = grpo_ext(dumps, "-o", page, "--png", picture, "--warn", "0.01", "--stop", "0.1")
    assert (done.returncode, done.stdout) == (0, f"{page}\n{picture}\n")
    assert done.stderr == "prob_diff_step_4.npy: step left out: the file is empty\n"


def test_the_command_without_dumps(tmp_path):
    done = grpo_ext(tmp_path, "-o", tmp_path / "r.html")
    assert done.returncode == 1
    assert re.match(r"grpo-ext report: .* holds no prob_diff_step_\*\.npy\.", done.stderr)
    assert not (tmp_path / "r.html").exists()


def test_a_report_imports_no_torch(dumps, tmp_path):
    code = "import sys; from pathlib import Path; from grpo_ext.consistency.report import write_report; "
    code += "write_report(Path(sys.argv[1]), Path(sys.argv[2])); "
    code += "print([m for m in ('torch', 'transformers', 'pandas', 'matplotlib', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, dumps, tmp_path / "r.html"], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_wheel_has_the_template(tmp_path):
    import zipfile

    from hatchling.builders.wheel import WheelBuilder

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    wheel = next(WheelBuilder(root).build(directory=str(tmp_path), versions=["standard"]))
    names = zipfile.ZipFile(wheel).namelist()
    folder = package.__name__.replace(".", "/")
    assert {f"{folder}/{name}" for name in ("page.html", "page.css", "page.js", "page.py")} <= set(names)
