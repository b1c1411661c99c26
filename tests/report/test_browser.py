"""The page in a real browser: charts are drawn, the controls work, nothing is asked of the network, no token text runs."""

import math

import numpy as np
import pytest

from grpo_ext.consistency.report import write_report
from grpo_ext.consistency.report.summary import decode, summarize
from tests.report.browser import NAMES, Browser, find_chromium
from tests.report.dumps import write_dump, write_tokens
from tests.report.test_page import HOSTILE

pytestmark = pytest.mark.browser

DIFFS = {
    2: [[1e-7, 2e-7, 0.0], [3e-7, 1e-6, 1e-7]],
    5: [[0.1, 0.02, 0.3, 0.0], [math.nan, 0.5, 0.01, 0.0]],
    40: [[1e-5, 1e-4]],
}
MASKS = {5: [[1, 1, 1, 1], [1, 1, 1, 0]]}
TEXTS = {
    (0, 0): HOSTILE[0],
    (0, 1): HOSTILE[1],
    (0, 2): HOSTILE[2],
    (0, 3): "d",
    (1, 0): "e",
    (1, 1): " the",
    (1, 2): HOSTILE[3],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed: apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page of three steps, opened once; the tests that need a fresh one open it anew."""
    directory = tmp_path_factory.mktemp("<img src=x onerror=hacked=1>")
    for step, diff in DIFFS.items():
        write_dump(directory, step, diff, MASKS.get(step))
    write_tokens(directory, 5, TEXTS)
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(directory, path, stop=0.2)
    browser.open(path)
    return path


def text(browser, selector):
    return browser.run(f"document.querySelector('{selector}').textContent")


def count(browser, selector):
    return browser.run(f"document.querySelectorAll('{selector}').length")


def assert_quiet(browser, page):
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]


def picture(browser):
    """(z of the heatmap, the image that is drawn of it)."""
    z = browser.run("document.getElementById('picture').data[0].z.map(row => [...row])")
    return z, browser.run("document.querySelector('#picture .heatmaplayer image').href.baseVal")


def expected_picture(step):
    diff = np.float32(DIFFS[step])
    mask = np.array(MASKS.get(step, np.ones(diff.shape)), dtype=bool)
    exponents = decode(summarize(step, diff, mask, max_cells=100).cells)
    return [[None if math.isnan(e) else pytest.approx(e) for e in row] for row in exponents.tolist()]


def test_the_worst_step_comes_first(browser, page):
    assert text(browser, "#worst-step") == "5"
    assert picture(browser)[0] == expected_picture(5)
    assert text(browser, "#step-facts").startswith(
        "2 × 4 (samples × positions), 6 tokens: mean 0.155, p99 0.49, max 0.5, 1 unscored"
    )
    assert_quiet(browser, page)


def test_charts_are_drawn(browser, page):
    assert count(browser, "#trend .scatterlayer .trace") == 3
    assert count(browser, "#trend .shapelayer path") == 3  # warn, stop, the selected step
    assert count(browser, "#picture .heatmaplayer .hm") == 2
    assert count(browser, "#picture .scatterlayer .trace") == 1
    assert count(browser, "#histogram .bars .point") == 41


@pytest.mark.parametrize(
    "action, step",
    [
        ("(s => { s.value = 2; s.dispatchEvent(new Event('change')) })(document.querySelector('select'))", 40),
        ("(s => { s.value = 0; s.dispatchEvent(new Event('input')) })(document.querySelector('#slider'))", 2),
        ("document.querySelector('#previous').click()", 2),
        ("document.querySelector('#next').click()", 40),
        ("location.hash = '#step=40'", 40),
    ],
)
def test_a_step_is_selected(browser, page, action, step):
    browser.run("select(1)")
    before = picture(browser)
    assert before[0] == expected_picture(5)
    browser.run(action)
    after = picture(browser)
    assert after[0] == expected_picture(step)
    assert after[1] != before[1]
    assert text(browser, "#worst-step") == str(step)
    assert browser.run("document.querySelector('#slider').value") == str(list(DIFFS).index(step))
    assert_quiet(browser, page)


def test_a_point_of_the_trend_can_be_clicked(browser, page):
    browser.run("select(1)")
    browser.run("scrollTo(0, 0)")
    x, y = browser.run(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelectorAll('#trend .scatterlayer .trace')[2].querySelector('.point').getBoundingClientRect())"
    )
    for kind, clicks in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 1)):
        browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if clicks else "none", clickCount=clicks)
        browser.run("new Promise(r => setTimeout(r, 100))")
    assert text(browser, "#worst-step") == "2"


def test_token_text_is_shown_and_does_not_run(browser, page):
    browser.run("select(1)")
    shown = browser.run("[...document.querySelectorAll('#step-worst code')].map(code => code.textContent)")
    # differences .5, .3, .1, .02, .01; that of "d" is 0, and "e" is unscored
    assert shown == ["␣the", "<img␣src=x␣onerror=hacked=1>", HOSTILE[0], HOSTILE[1], "\\u2028'\"&{{7*7}}"]
    assert count(browser, "#run-worst tbody tr") == 5 + 5 + 2  # differences above 0
    assert "<img src=x onerror=hacked=1>" in text(browser, ".where")
    assert browser.run("typeof window.hacked") == "undefined"
    assert count(browser, "img") == 0
    assert_quiet(browser, page)


def test_without_text_that_is_said(browser, page):
    browser.run("select(2)")
    assert "prob_tokens_step_40.parquet" in text(browser, "#text-note")
    heads = browser.run("[...document.querySelectorAll('#step-worst th')].map(th => th.textContent)")
    assert heads == ["sample", "position", "difference"]


def test_dark(browser, page):
    color = "document.getElementById('trend').layout.font.color"
    light = browser.run(color)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.run("0")
    assert browser.run(color) != light
    browser.send("Emulation.setEmulatedMedia", features=[])
    assert_quiet(browser, page)


def test_an_address_can_name_a_step(browser, page):
    browser.open(page, "#step=40")
    assert text(browser, "#worst-step") == "40"
    browser.open(page, "#step=41")
    assert text(browser, "#worst-step") == "5"


def test_an_injected_script_is_refused(browser, page):
    """The second lock, were escaping ever to fail: the page's policy."""
    browser.open(page)
    browser.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hacked = 1'}))")
    assert browser.run("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in event["params"]["entry"]["text"] for event in browser.errors())


KINDS = [
    ([[math.nan], [math.nan]], None, "Masked tokens are grey, unscored ones pink. Below: the mean by position."),
    ([[0.1, 0.2]], [[0, 0]], "No token of this step is under the mask."),
    ([[math.nan, math.nan], [0.1, 0.2]], None, "Masked tokens are grey, unscored ones pink. Below: the mean by position."),
    (np.zeros((0, 3)), None, "No token of this step is under the mask."),
    ([[0.0]], None, "Masked tokens are grey. Below: the mean by position."),
    (
        np.full((300, 700), 0.1),
        None,
        "A cell is the largest of 2 samples × 2 positions. Masked tokens are grey. Below: the mean by position.",
    ),
]


def test_steps_of_any_kind(browser, tmp_path):
    for step, (diff, mask, _) in enumerate(KINDS):
        write_dump(tmp_path, step, diff, mask)
    write_report(tmp_path, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    for step, (_, _, note) in enumerate(KINDS):
        browser.run(f"select({step})")
        assert text(browser, "#picture-note") == note
        assert_quiet(browser, tmp_path / "report.html")


@pytest.mark.parametrize("diff, mask", [([[0.1, 0.2]], None), ([[0.1, 0.2]], [[0, 0]])])
def test_a_single_step(browser, tmp_path, diff, mask):
    write_dump(tmp_path, 7, diff, mask)
    write_report(tmp_path, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert text(browser, "#worst-step") == "7"
    assert count(browser, ".chart .main-svg") >= 3
    assert_quiet(browser, tmp_path / "report.html")
