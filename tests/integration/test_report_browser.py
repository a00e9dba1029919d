"""The report in a real browser: no complaint, nothing fetched, all figures there, readable on a phone and in the dark."""

import pytest
from tests import chromium, records

from untax.meter import report

# Figures that are shown, with their size and how many marks they have; the pair for the other window is hidden.
_FIGURES = """
[...document.querySelectorAll('figure[data-figure]')].map(figure => {
  const shown = [...figure.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 0)
  const box = shown[0]?.getBoundingClientRect()
  return {name: figure.dataset.figure, shown: shown.length, width: box?.width, height: box?.height,
          marks: shown[0]?.querySelectorAll('rect,circle,path,polyline,line').length}
})
"""
# Text that is cut off by its picture's edge, or smaller than anybody reads.
_BAD_TEXT = """
[...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().width > 0).flatMap(svg => {
  const edge = svg.getBoundingClientRect()
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect()
    const size = parseFloat(getComputedStyle(text).fontSize) * edge.width / svg.viewBox.baseVal.width
    return box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 1 || size < 10
  }).map(text => svg.getAttribute('aria-label') + ': ' + text.textContent)
})
"""
_COLOURS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('svg text')).fill]"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    records.write(place / "records.jsonl", records.whole_run([*records.plain_cases(), *records.more_cases()], 12))
    return report.write(place, place / "report", png=False)[0]


@pytest.fixture(scope="module")
def browser():
    if reason := chromium.unavailable_reason():
        pytest.skip(reason)
    with chromium.Browser() as opened:
        yield opened


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 820, 1280])
def test_the_page_opens_without_complaint_and_with_every_figure(browser, page, width, is_dark):
    browser.open(page, width=width, is_dark=is_dark)

    figures = browser.evaluate(_FIGURES)
    assert browser.complaints() == []
    assert [figure["name"] for figure in figures] == [
        "composition", "cold-start", "distribution", "amortisation", "completion", "scale", "paths", "concurrency",
    ]  # fmt: skip
    for figure in figures:
        assert figure["shown"] == 1 and figure["marks"] > 10, figure
        assert 0.8 * min(width, 840) - 40 <= figure["width"] <= width and figure["height"] > 80, figure
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in themselves
    assert browser.evaluate(_BAD_TEXT) == []
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_follows_the_readers_colour_scheme(browser, page):
    colours = []
    for is_dark in (False, True):
        browser.open(page, width=800, is_dark=is_dark)
        colours.append([sum(map(int, colour[4:-1].split(","))) for colour in browser.evaluate(_COLOURS)])
    (light_ground, light_ink), (dark_ground, dark_ink) = colours
    assert light_ground > 600 and light_ink < 200
    assert dark_ground < 150 and dark_ink > 600


def test_the_browser_would_have_noticed(browser, tmp_path):
    """A page with an error, a missing picture and a cut off text is complained about: the test above can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<svg viewBox='0 0 50 20' width='50' aria-label='x' style='overflow:visible'><text y='15'>much too long a text</text></svg>"
        "<img src='nowhere.png'><script>console.error('no')</script>"
    )
    browser.open(bad, width=800)
    assert len(browser.complaints()) >= 2
    assert browser.evaluate(_BAD_TEXT.replace("figure svg", "svg"))
