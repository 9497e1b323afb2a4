"""The page in a real browser: it draws, says nothing on the console, loads nothing, and answers mouse and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import many_ranks, mixed_job, pipeline_traces

from prism_sdk.report import report_content, write_report

Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Write a report, open it, and fail on anything that the page complains about or asks the network for."""
    complaints: list[str] = []
    contexts = []

    def open_(content: dict[str, Any], **options: Any) -> Any:
        path = tmp_path / f"report{len(contexts)}.html"
        write_report(content, path)
        context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector('html[data-ready="yes"]', state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def canvas_colours(page: Any, selector: str) -> int:
    """How many colours a canvas shows: a blank one has one or two."""
    return int(page.evaluate(
        """(selector) => {
            const canvas = document.querySelector(selector), context = canvas.getContext("2d");
            const data = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return new Set(data).size;
        }""", selector))  # fmt: skip


def drawn(page: Any) -> None:
    """Return when all that was asked for has been drawn, however busy the machine is."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def test_everything_is_drawn(open_page: Open, tmp_path: Path) -> None:
    page = open_page(report_content(mixed_job(tmp_path / "a.prism")))
    for selector in ("#timeline canvas", "#heatmap canvas", "#bars canvas", "#steps canvas", "#memory-chart canvas",
                     "#matrix canvas"):  # fmt: skip
        assert canvas_colours(page, selector) > 3, selector
    assert page.text_content("h1") == "a.prism"
    assert "observed: Measured" in page.text_content("#worth-text")
    assert page.locator("#tables table").count() >= 5
    assert "peak 2.0 MiB" in page.text_content("#memory-legend")
    assert page.locator("#comparison").is_hidden()


def test_keys_and_search(open_page: Open, tmp_path: Path) -> None:
    page = open_page(report_content(mixed_job(tmp_path / "a.prism")))
    before = page.locator("#timeline").screenshot()
    page.focus("#timeline")
    page.keyboard.press("n")
    assert "rank 0: compute, forward, microbatch 0" in page.text_content("#chosen")
    page.keyboard.press("ArrowDown")
    assert "rank 1" in page.text_content("#chosen")
    page.keyboard.press("+")
    drawn(page)
    assert page.locator("#timeline").screenshot() != before
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    assert page.text_content("#chosen") == ""
    page.fill("#find", "rank:3 backward compute")
    assert page.text_content("#find-count") == "1 found"
    page.press("#find", "Enter")
    assert "rank 3: compute, backward" in page.text_content("#chosen")
    assert "on the critical path" in page.text_content("#chosen")
    page.fill("#find", "nothing of this name")
    assert page.text_content("#find-count") == "nothing found"


def test_hovering_zooming_and_the_critical_path(open_page: Open, tmp_path: Path) -> None:
    page = open_page(report_content(mixed_job(tmp_path / "a.prism")))
    box = page.locator("#timeline .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.1 * box["height"])
    tip = page.text_content("#tip")
    assert "rank 0: compute, forward" in tip and "slack" in tip
    whole = page.locator("#timeline canvas").screenshot()
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.12 * box["height"], steps=4)
    page.mouse.up()
    drawn(page)
    zoomed = page.locator("#timeline canvas").screenshot()
    assert zoomed != whole
    page.click("#zoom-reset")
    page.mouse.move(2, 2)
    drawn(page)
    page.check("#critical-only")
    drawn(page)
    assert page.locator("#timeline canvas").screenshot() not in (whole, zoomed)


def test_the_heat_map_leads_to_the_rank(open_page: Open, tmp_path: Path) -> None:
    page = open_page(report_content(mixed_job(tmp_path / "a.prism")))
    page.focus("#heatmap")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    text = page.text_content("#heat-chosen")
    assert "rank 3: compute" in text and "straggler: compute" in text
    page.keyboard.press("Enter")
    assert "rank 3" in page.text_content("#chosen")
    page.select_option("#metric", "imbalance")
    assert "dark 0 ns" in page.text_content("#heat-range")


def test_real_beside_emulated(open_page: Open, tmp_path: Path) -> None:
    emulated, real = pipeline_traces(tmp_path)
    page = open_page(report_content(emulated, compare=real))
    assert "4.76 % faster" in page.text_content("#sentence")
    page.focus("#timeline")
    page.keyboard.press("n")
    page.keyboard.press("ArrowDown")
    assert "rank 0, real run" in page.text_content("#chosen")
    before = page.locator("#timeline").bounding_box()["height"]
    page.uncheck("#overlay")
    assert page.locator("#timeline").bounding_box()["height"] < before


def test_light_dark_and_paper(open_page: Open, tmp_path: Path) -> None:
    content = report_content(mixed_job(tmp_path / "a.prism"))
    light, dark = open_page(content, color_scheme="light"), open_page(content, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(ground) == "rgb(255, 255, 255)" and dark.evaluate(ground) == "rgb(20, 23, 26)"
    pictures = [page.locator("#timeline canvas").screenshot() for page in (light, dark)]
    assert pictures[0] != pictures[1]
    dark.click("#theme")
    assert dark.evaluate(ground) == "rgb(255, 255, 255)"
    assert dark.locator("#timeline canvas").screenshot() == pictures[0]
    dark.emulate_media(media="print")
    assert dark.locator("#find").is_hidden() and dark.locator("#bars canvas").is_visible()
    assert len(dark.pdf()) > 20_000
    dark.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert dark.locator("#timeline canvas").bounding_box()["width"] <= 720
    dark.evaluate("dispatchEvent(new Event('afterprint'))")
    assert dark.locator("#timeline canvas").bounding_box()["width"] > 900


def test_a_narrow_window_has_no_sideways_scrolling(open_page: Open, tmp_path: Path) -> None:
    page = open_page(report_content(mixed_job(tmp_path / "a.prism")))
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_function("innerWidth === 420 && document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_thousands_of_ranks(open_page: Open, tmp_path: Path) -> None:
    content = report_content(many_ranks(tmp_path / "many.prism", 8192))
    page = open_page(content)
    assert "ranks are drawn over time, all in the heat map" in page.text_content("#facts")
    page.focus("#heatmap")
    page.keyboard.press("ArrowRight")
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    assert "rank 7: compute" in page.text_content("#heat-chosen")
    spent = page.evaluate("() => { const start = performance.now(); redrawAll(); return performance.now() - start; }")
    assert spent < 3000
    assert (tmp_path / "report0.html").stat().st_size < 2_500_000
