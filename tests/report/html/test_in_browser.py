"""Pages in a browser: at every size, wide and narrow, light and dark; and what readers do with them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By

import autopar
from autopar.api.objects import Shown, shown_as
from autopar.formats.timeline import Timeline
from autopar.report.html.page import MOST_BYTES
from browser import NARROW, WIDE, Browser, a_browser
from equal_plans import equal_plan, llama_profile
from hostile import HOSTILE
from played import play, small_plan
from random_problems import gpt_profile

pytestmark = pytest.mark.slow
HOSTILE_NAME = (
    "</script><script>hacked = 1</script>\"'><img src=x onerror='hacked = 2'>{{ 7 }} \u05e9\u05dc\u05d5\u05dd "
    + "x" * 300
)
PICTURES = os.environ.get("AUTOPAR_PICTURES")
"""A folder in which pictures of all pages are kept, for people to look at."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with a_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def _plan(stages: int, replicas: int, micro_batches: int = 8) -> autopar.Plan:
    profile = llama_profile(max(12, stages), batch=micro_batches * replicas)
    plan, cluster = equal_plan(profile, "1f1b", stages, replicas, micro_batches)
    return autopar.Plan.of(plan, profile, cluster)


def _over(micro_batches: int) -> str:
    folder = Path()
    play(small_plan((4, 2, 1), micro_batches), "measured", jitter=0.1).save(folder / "measured.json")
    play(small_plan((4, 2, 1), micro_batches)).save(folder / "predicted.json")
    return autopar.show(folder / "measured.json", folder / "predicted.json").to_html()


def _held() -> Timeline:
    timeline = play(small_plan((1,) * 4, 8), "rehearsed")
    for rank in range(4):
        timeline.memory[rank] = [(at * timeline.end_s / 9, (rank + at + 1) * 2**20) for at in range(9)]
        timeline.limits_bytes[rank] = 14 * 2**20
    return timeline


def _report(steps: int) -> autopar.Report:
    kept = autopar.Report.load(Path(__file__).parents[2] / "formats/kept/report.json")
    loss = tuple(3 / (1 + step) for step in range(steps))
    return kept.model_copy(update={"loss": loss, "losses": {"token": loss, "log/accuracy": loss[::-1]}})


def _compared() -> Shown:
    return autopar.compare(gpt_profile(blocks=3), autopar.Cluster.of("4xH100"), gpus=2, times_of="cpu")


PAGES: dict[str, Callable[[], str]] = {
    "plan of 4 ranks": lambda: _plan(4, 1).to_html(),
    "plan of 64 ranks": lambda: _plan(8, 8, 16).to_html(),
    "plan of 1,024 ranks": lambda: _plan(64, 16, 64).to_html(),
    "plan of 1,024 stages": lambda: _plan(1024, 1, 4).to_html(),
    "profile": lambda: shown_as(autopar.Profile, gpt_profile(blocks=40)).to_html(),
    "long profile": lambda: shown_as(autopar.Profile, gpt_profile(blocks=600)).to_html(),
    "cluster": lambda: autopar.Cluster.of("128x8xH100:400Gbps").to_html(),
    "trace": lambda: autopar.Timeline.of(_held()).to_html(),
    "trace over plan": lambda: _over(8),
    "report": lambda: _report(200).to_html(),
    "report of a step": lambda: _report(1).to_html(),
    **{f"hostile {kind}": lambda kind=kind: HOSTILE[kind](HOSTILE_NAME).to_html() for kind in HOSTILE},
}


@pytest.mark.some(7)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_read_at_any_width_by_day_and_by_night(
    name: str, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGES[name]()
    assert len(text.encode()) <= MOST_BYTES
    Path("page.html").write_text(text)
    browser.open(tmp_path / "page.html")
    for width in (WIDE, NARROW):
        for dark in (False, True):
            browser.turn(width, dark=dark)
            assert browser.problems() == [], f"{width} pixels, {'dark' if dark else 'light'}"
            assert _is_dark(browser) == dark
            if PICTURES:
                browser.picture(Path(PICTURES) / f"{name} {width} {'dark' if dark else 'light'}.png")
    assert browser.heard() == []


def _is_dark(browser: Browser) -> bool:
    paper = browser.ask("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, paper[4:-1].split(","))) < 384


@pytest.fixture
def plan_page(browser: Browser, tmp_path: Path) -> Browser:
    (tmp_path / "page.html").write_text(_plan(4, 2).to_html())
    browser.open(tmp_path / "page.html")
    browser.turn(WIDE, dark=False)
    return browser


def test_a_pointer_on_an_action_is_told_its_name_and_seconds(plan_page: Browser) -> None:
    for *place, what, name, took in _actions(plan_page, "F0@0", "B1@1", "R0@1", "activations"):
        x, y = plan_page.ask(_MIDDLE, place)
        plan_page.ask("scrollTo(0, scrollY + arguments[0] - 300)", y)
        x, y = plan_page.ask(_MIDDLE, place)
        plan_page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        plan_page.settle()
        said = plan_page.ask("return document.getElementById('vg-tooltip-element')?.innerText")
        assert said.split() == ["action", *name.split(), "what", *what.split(), "takes", *took.split()]


_MIDDLE = """
  const [x, x2, y, y2] = arguments[0];
  return drawn.then(([{view}]) => {
    const box = view.container().getBoundingClientRect(), origin = view.origin(), padding = view.padding();
    const [left, top] = [box.left + origin[0] + padding.left, box.top + origin[1] + padding.top];
    return [left + view.scale("x")((x + x2) / 2), top + view.scale("y")((y + y2) / 2)];
  });
"""


def _actions(page: Browser, *names: str) -> list[list[Any]]:
    spec = json.loads(page.ask("return document.getElementById('chart-0').textContent"))
    return [next(row for row in spec["data"]["values"]["rows"] if row[5].startswith(name)) for name in names]


def test_rows_are_sorted_by_click_and_by_key_and_stages_open(plan_page: Browser) -> None:
    table = next(each for each in plan_page.driver.find_elements(By.TAG_NAME, "table") if "forward" in each.text)

    def column(at: int) -> list[str]:
        return [
            row.find_elements(By.TAG_NAME, "td")[at].text for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
        ]

    heads = [each.text for each in table.find_elements(By.TAG_NAME, "th")]
    button = table.find_elements(By.CSS_SELECTOR, "th button")[heads.index("stage")]
    assert column(0) == ["0", "1", "2", "3"]
    button.send_keys(Keys.ENTER)
    assert column(0) == ["0", "1", "2", "3"]
    button.click()
    assert column(0) == ["3", "2", "1", "0"]
    assert button.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    line = plan_page.driver.find_elements(By.TAG_NAME, "summary")[1]
    layers = line.find_element(By.XPATH, "..").find_element(By.TAG_NAME, "p")
    assert not layers.is_displayed()
    line.send_keys(Keys.ENTER)
    assert layers.is_displayed()
    assert "model.layers" in layers.text


def test_a_browser_that_is_not_there_is_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("browser.CHROMIUM", Path("/nowhere"))
    with pytest.raises(pytest.fail.Exception, match="apt-get install -y chromium chromium-driver"), a_browser(Path()):
        pass
