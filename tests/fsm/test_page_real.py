"""The exported page in a real browser: it draws, explains points, and runs nothing of a trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.fsm.traces import Run, healthy_run, pinned_point
from vime.cli import main

pytestmark = pytest.mark.real

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Page:
    """One exported page, open in Chromium."""

    def __init__(self, browser: webdriver.Chrome, trace: Path, *filters: str) -> None:
        self.browser = browser
        self.path = trace.with_suffix(".html")
        export = ["trace", "export", str(trace), "--format", "html", "-o", str(self.path)]
        assert main([*export, *filters]) == 0
        browser.get(self.path.as_uri())

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        (element,) = self.all(selector)
        return element

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console."""
        return [str(entry["message"]) for entry in self.browser.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.fail("this test needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1400,1000"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(programs[1])))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, tmp_path: Path) -> Page:
    """Two scores, and a skip because an engine hung."""
    run = Run(tmp_path / "trace.jsonl")
    run.fire("engine", "eval-0", "start")
    run.fire("engine", "eval-0", "ready", 30)
    pinned_point(run, 10, score=0.25)
    pinned_point(run, 20, score=0.75)
    run.fire("point", 30, "dispatch")
    run.fire("point", 30, "export")
    run.fire("point", 30, "pin", 4)
    detail = {"message": "no answer within 600 s"}
    suspect = run.fire("engine", "eval-0", "suspect", 3, reason="hung", detail=detail)
    run.fire("point", 30, "skip", reason="unhealthy", cause_seq=suspect, detail=detail)
    run.trace.close()
    return Page(browser, run.path)


def test_the_page_shows_curve_timeline_and_tables_and_asks_the_network_for_nothing(
    page: Page,
) -> None:
    assert page.one("body").get_attribute("data-ready") == "yes"
    assert page.one("h1").text == "run-1"
    assert page.texts("#skips tbody tr") == ["30 unhealthy no answer within 600 s +1m14s"]
    assert [row.split()[:2] for row in page.texts("#points tbody tr")] == [
        ["10", "done"],
        ["20", "done"],
        ["30", "skipped"],
    ]
    assert [dot.get_attribute("data-point") for dot in page.all("#curve circle")] == ["10", "20"]
    low, high = (float(dot.get_attribute("cy") or 0) for dot in page.all("#curve circle"))
    assert low > high  # the second score is better, so it stands higher
    rows = [row.get_attribute("data-life") for row in page.all("#timeline .row")]
    assert rows == ["point 10", "point 20", "point 30", "engine eval-0"]
    widths = [bar.rect["width"] for bar in page.all("[data-life='point 10'] .exporting")]
    assert len(widths) == 1
    assert widths[0] > 10
    assert page.browser.execute_script("return performance.getEntriesByType('resource')") == []
    assert page.complaints() == []


@pytest.mark.parametrize(
    "place",
    ["#curve [data-point='30']", "#timeline [data-life='point 30']", "#skips [data-point='30']"],
)
def test_a_click_on_a_point_shows_its_chain_of_causes(page: Page, place: str) -> None:
    page.one(place).click()
    assert page.one("#why-title").text == "Why: point 30"
    links = page.texts("#chain li")
    assert links[0].endswith("point 30 was skipped: unhealthy: no answer within 600 s")
    assert links[1].endswith("because engine eval-0 became suspect: hung: no answer within 600 s")
    assert len(page.all(".chosen")) == 4  # curve, timeline and both tables
    page.one("#points [data-point='10']").send_keys(Keys.ENTER)
    assert page.one("#why-title").text == "Why: point 10"
    assert page.complaints() == []


HOSTILE = [
    "</script><script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 2'>",
    "--></title><svg onload='window.owned = 3'>",
    "{script}{data}",
    "javascript:window.owned=4",
    "&lt;b&gt; \"'`$&",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_trace_is_shown_and_never_run(
    browser: webdriver.Chrome, tmp_path: Path, text: str
) -> None:
    run = Run(tmp_path / "trace.jsonl", run_id=text)
    run.fire("engine", text, "start", reason=text)
    for point in (text, "10"):
        run.fire("point", point, "dispatch", weight_version=text)
        run.fire("point", point, "export")
        run.fire("point", point, "skip", reason=text, detail={"message": text})
    run.fire("point", "20", "dispatch")
    run.fire("point", "20", "run")
    run.fire("point", "20", "finish", detail={"metrics": {f"eval/{text.replace('/', '')}": 0.5}})
    run.trace.close()
    page = Page(browser, run.path)
    page.all("#skips tbody tr")[0].click()
    assert page.one("body").get_attribute("data-ready") == "yes"
    assert browser.execute_script("return window.owned") is None
    assert page.all("img") == []
    assert len(page.all("script")) == 2
    assert page.one("h1").get_attribute("textContent") == text
    assert browser.title == " ".join(text.split())
    cells = [cell.get_attribute("textContent") for cell in page.all("#skips tbody td")]
    assert cells[:3] == [text, text, text]
    assert page.complaints() == []


def test_a_script_that_got_into_the_page_would_not_run(page: Page) -> None:
    text = page.path.read_text().replace("</main>", "<script>window.owned = 1</script></main>")
    page.path.write_text(text)
    page.browser.get(page.path.as_uri())
    assert page.browser.execute_script("return window.owned") is None
    (complaint,) = page.complaints()
    assert "Content Security Policy" in complaint


def test_a_long_run_is_shown_by_its_latest_points_and_says_so(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    page = Page(browser, healthy_run(tmp_path / "trace.jsonl", num_points=2100))
    assert page.texts("#notes li") == ["the last 2000 of 2100 points are shown"]
    assert len(page.all("#points tbody tr")) == 2000
    assert page.complaints() == []


def test_an_empty_trace_makes_an_empty_page(browser: webdriver.Chrome, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    page = Page(browser, tmp_path / "trace.jsonl")
    assert page.one("body").get_attribute("data-ready") == "yes"
    assert page.complaints() == []
