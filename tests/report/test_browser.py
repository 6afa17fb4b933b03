"""The report in headless Chromium: nothing goes wrong, nothing leaves it, and what can be pressed does something."""

import shutil
import struct
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from browser import Browser
from fabricated import fabricate, make_attention, spec

from qklab.report import build_report
from qklab.report.build import render_report
from qklab.report.data import gather_data
from qklab.report.serve import ReportServer
from qklab.study.plan import PlannedRun

FIGURES = ("forest", "curves", "rates", "cost", "entropy", "sink", "maps", "logits")


def bring(browser: Browser, figure: str) -> None:
    """Into view."""
    browser.run(f"document.getElementById('{figure}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.settle()


def marks(browser: Browser, figure: str) -> str:
    """Everything drawn in a figure, as text to compare."""
    return browser.run(f"return [...document.querySelectorAll('#fig-{figure} .mark')].map(m => m.outerHTML).join('')")


def drawn(browser: Browser, figure: str) -> str:
    """A figure with its axes: another unit may move these alone."""
    return browser.run(f"return document.querySelector('#{figure} svg').innerHTML")


def test_no_error_no_request_and_every_figure_has_marks(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    for figure in FIGURES:
        count = browser.run(f"return document.querySelectorAll('#fig-{figure} svg .mark').length")
        assert count >= 5, figure
        assert "NaN" not in browser.run(f"return document.querySelector('#fig-{figure} svg').outerHTML"), figure
    assert browser.run("return document.querySelectorAll('section').length") == 10
    assert browser.complaints == []
    assert browser.requests == [report.as_uri()]


def test_the_page_itself_forbids_requests(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    said = browser.run("try { await fetch('http://127.0.0.1:9/'); return 'sent' } catch (e) { return 'refused' }")
    assert said == "refused"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_figures_out_of_view_are_drawn_when_they_come_into_view(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri(), height=500)
    drawn = "return document.querySelector('#fig-logits svg') !== null"
    assert browser.run(drawn) is False
    browser.scroll_through()
    assert browser.run(drawn) is True


def test_hiding_an_arm_takes_it_out_of_every_figure_and_back(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    before = {figure: marks(browser, figure) for figure in FIGURES}
    browser.click('.legend[data-arm="1"]')
    assert browser.run("return document.querySelector('.legend[data-arm=\"1\"]').ariaPressed") == "false"
    browser.scroll_through()
    for figure in FIGURES:
        assert 'data-arm="1"' in before[figure], figure
        assert 'data-arm="1"' not in marks(browser, figure), figure
    browser.click('.legend[data-arm="1"]')
    browser.scroll_through()
    assert {figure: marks(browser, figure) for figure in FIGURES} == before
    for k in range(5):
        browser.click(f'.legend[data-arm="{k}"]')
    browser.scroll_through()
    assert browser.run("return document.querySelectorAll('figure .mark').length") == 0
    assert browser.complaints == []


def test_every_switch_changes_its_figure(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    switches = browser.run(
        "return [...document.querySelectorAll('figure button[aria-pressed=false]')]"
        ".filter(b => b.offsetParent).map(b => [b.closest('figure').id, b.dataset.control, b.dataset.value])"
    )
    assert {("fig-curves", "x", "seconds"), ("fig-curves", "scale", "log"), ("fig-cost", "x", "step")} <= {
        tuple(switch) for switch in switches
    }
    for figure, control, value in switches:
        bring(browser, figure)
        back = browser.run(
            f"return document.querySelector('#{figure} [data-control={control}][aria-pressed=true]').dataset.value"
        )
        before = drawn(browser, figure)
        browser.click(f'#{figure} [data-control={control}][data-value="{value}"]')
        assert drawn(browser, figure) != before, (figure, control, value)
        assert browser.run(f"return document.querySelectorAll('#{figure} .mark').length") > 0
        browser.click(f'#{figure} [data-control={control}][data-value="{back}"]')
        assert drawn(browser, figure) == before, (figure, control, value)
    for figure in ("entropy", "logits", "maps"):
        bring(browser, f"fig-{figure}")
        before = drawn(browser, f"fig-{figure}")
        browser.run(
            f"const s = document.querySelector('#fig-{figure} select'); s.selectedIndex = 1;"
            "s.dispatchEvent(new Event('change'))"
        )
        browser.settle()
        same = drawn(browser, f"fig-{figure}") == before
        assert same == (figure == "maps"), figure  # the made-up heads are all alike
    assert browser.complaints == []


def test_the_other_corpus_can_be_shown(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    browser.click('[data-group="1"]')
    browser.scroll_through()
    assert browser.run("return document.querySelector('[data-group=\"1\"]').ariaSelected") == "true"
    assert "novels" in browser.run("return document.querySelector('#fig-curves svg title').textContent")
    assert browser.run("return document.querySelectorAll('.answer').length") == 2


def luminance(browser: Browser, where: str) -> float:
    colour = browser.run(f"return getComputedStyle(document.querySelector('{where}')).backgroundColor")
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    light = marks(browser, "curves")
    assert luminance(browser, "body") > 200
    browser.dark(True)
    browser.scroll_through()
    assert luminance(browser, "body") < 60
    assert marks(browser, "curves") != light
    browser.click("#theme")
    browser.scroll_through()
    assert luminance(browser, "body") > 200
    assert marks(browser, "curves") == light
    browser.click("#theme")
    assert luminance(browser, "body") < 60
    browser.dark(False)  # what the button said stays
    browser.settle()
    assert luminance(browser, "body") < 60


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_no_width_scrolls_sideways(browser: Browser, report: Path, width: int) -> None:
    browser.show_all(report.as_uri(), width=width)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.settle()
    assert browser.run("return document.documentElement.scrollWidth") <= width
    inside = browser.run(
        "return [...document.querySelectorAll('figure svg text')].filter(t => { const a = t.getBoundingClientRect(),"
        " b = t.ownerSVGElement.getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1 })"
        ".map(t => t.closest('figure').id + ': ' + t.textContent)"
    )
    assert inside == []


def test_marks_tell_their_numbers_by_mouse_and_by_keyboard(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    box = browser.run(
        "const m = document.querySelector('#fig-forest .mark');"
        "m.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const b = m.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    browser.hover(*box)
    assert "nats per token" in browser.run("return document.getElementById('tip').textContent")
    browser.hover(2, 2)
    assert browser.run("return document.getElementById('tip').hidden") is True
    for figure in FIGURES:
        browser.run(
            f"const s = document.querySelector('#fig-{figure} svg[tabindex]');"
            "s.scrollIntoView({block: 'center', behavior: 'instant'}); s.focus({preventScroll: true})"
        )
        browser.settle()
        browser.key("ArrowRight")
        browser.settle()
        first = browser.run("return document.getElementById('tip').textContent")
        browser.key("ArrowRight")
        browser.settle()
        assert first, figure
        assert browser.run("return document.getElementById('tip').hidden") is False, figure
        browser.key("Escape")
        browser.settle()
        assert browser.run("return document.getElementById('tip').hidden") is True, figure


def test_everything_that_can_be_pressed_can_be_reached_and_has_a_name(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    nameless = browser.run(
        "return [...document.querySelectorAll('button, select, input, svg[tabindex]')].filter(e => e.tabIndex < 0 ||"
        " !(e.ariaLabel || e.textContent.trim() || e.closest('label')?.textContent.trim())).map(e => e.outerHTML)"
    )
    assert nameless == []
    browser.run("document.querySelector('.legend').focus()")
    browser.key("Enter")
    browser.settle()
    assert browser.run("return document.querySelector('.legend').ariaPressed") == "false"
    assert browser.run("return document.activeElement === document.querySelector('.legend')") is True


def test_names_are_text_and_never_markup(browser: Browser, report: Path, tmp_path: Path) -> None:
    data = gather_data([fabricate(tmp_path / "s", spec(seeds=1, lrs=[1e-3]), steps=20)])
    wild = "<img src=x onerror=document.title='owned'>"
    data["groups"][0] |= {"corpus": wild, "headline": wild, "notes": [wild], "settling": wild, "command": wild}
    data["groups"][0]["arms"][1]["name"] = wild
    (tmp_path / "r.html").write_text(render_report(data), encoding="utf-8")
    browser.show_all((tmp_path / "r.html").as_uri())
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.title") != "owned"
    assert browser.complaints == []


def test_figures_and_tables_are_saved(browser: Browser, report: Path, tmp_path: Path) -> None:
    browser.show_all(report.as_uri())
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.settle()
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    buttons = browser.run("return document.querySelectorAll('[data-save]').length")
    saved: list[Path] = []
    for k in range(buttons):
        until = time.monotonic() + 20
        browser.run(
            f"document.querySelectorAll('[data-save]')[{k}].click(); await new Promise(r => setTimeout(r, 110))"
        )
        while len(saved := [p for p in tmp_path.iterdir() if p.suffix in (".svg", ".png", ".csv")]) <= k:
            assert time.monotonic() < until, sorted(p.name for p in saved)
            time.sleep(0.05)  # Chromium refuses more than ten in a second
    assert buttons == 2 * len(FIGURES) + 4
    for path in saved:
        content = path.read_bytes()
        if path.suffix == ".svg":
            assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
            assert "k=v" in content.decode()  # a figure takes the names of its arms along
        elif path.suffix == ".png":
            width, height = struct.unpack(">II", content[16:24])
            assert content[:4] == b"\x89PNG"
            assert width >= 600
            assert height >= 400
            assert len(set(content[64:])) > 100
    ledger = next(path for path in saved if path.name.endswith("ledger.csv")).read_text().splitlines()
    assert ledger[0].startswith("arm,learning_rate,learning_rates_tried")
    assert ledger[2].startswith("k=v,0.003,0.001 0.003,4,0,")
    runs = next(path for path in saved if path.name.endswith("runs.csv")).read_text().splitlines()
    assert len(runs) == 1 + 20
    assert "0123456789abcdef0123456789abcdef01234567" in runs[1]
    assert browser.complaints == []


def test_a_single_seed_and_a_study_without_runs_are_said_plainly(browser: Browser, tmp_path: Path) -> None:
    one = build_report([fabricate(tmp_path / "one", spec(seeds=1), steps=20)], tmp_path / "one.html")
    browser.show_all((one).as_uri())
    assert "anecdote" in browser.run("return document.querySelector('#fig-forest').textContent")
    assert browser.run("return document.querySelectorAll('#fig-forest path.mark[stroke-width=\"2.2\"]').length") == 0
    assert browser.complaints == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "study.json").write_bytes((tmp_path / "one" / "study.json").read_bytes())
    browser.show_all(build_report([tmp_path / "none"], tmp_path / "none.html").as_uri())
    assert "Nothing to compare" in browser.run("return document.querySelector('.headline').textContent")
    assert browser.complaints == []


def test_plain_runs_have_a_page_without_a_verdict(browser: Browser, tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "s", spec(seeds=2, lrs=[1e-3]), steps=40)
    (folder / "study.json").unlink()
    browser.show_all(build_report([folder], tmp_path / "r.html").as_uri())
    assert "no study" in browser.run("return document.querySelector('#verdict').textContent")
    assert browser.run("return document.querySelectorAll('#fig-curves .mark').length") > 5
    assert browser.complaints == []


def test_the_served_page_reloads_when_a_run_has_news_and_keeps_what_was_hidden(
    browser: Browser, tmp_path: Path
) -> None:
    study = spec(seeds=1, lrs=[1e-3])
    last = PlannedRun("stdlib", "qk-norm", 1e-3, 0)
    folder = fabricate(tmp_path / "s", study, steps=20, unfinished=(last,))
    with ReportServer([folder], 0, every=0.1) as live:
        browser.open(live.address)
        assert "4 of 5 runs have ended" in browser.run("return document.querySelector('.answer').textContent")
        browser.click('.legend[data-arm="1"]')
        shutil.rmtree(last.folder_in(folder))
        fabricate(folder, study, steps=20, only=last)
        until = time.monotonic() + 30
        while "4 of 5 runs" in browser.run("return document.querySelector('.answer')?.textContent ?? '4 of 5 runs'"):
            assert time.monotonic() < until
            time.sleep(0.1)
        browser.settle()
        assert browser.run("return document.querySelector('.legend[data-arm=\"1\"]').ariaPressed") == "false"
        assert {url.removeprefix(live.address) for url in browser.requests} == {"", "version"}
        assert browser.complaints == []
        browser.open("about:blank")


def test_three_hundred_runs_load_at_once_and_stay_small(browser: Browser, tmp_path: Path) -> None:
    study = spec(seeds=20, lrs=[1e-3, 2e-3, 3e-3])
    folder = fabricate(tmp_path / "s", study, steps=300, everywhere=True)
    data = gather_data([folder])
    assert len(data["groups"][0]["runs"]) == 300
    data["groups"][0]["attention"] = {arm["name"]: make_attention() for arm in data["groups"][0]["arms"]}
    path = tmp_path / "r.html"
    path.write_text(render_report(data), encoding="utf-8")
    assert path.stat().st_size < 5e6
    seconds = min(browser.open(path.as_uri()) for _ in range(2))
    assert seconds < 2
    browser.scroll_through()
    assert browser.run("return document.querySelectorAll('figure svg').length") == len(FIGURES)
    pressed = browser.run(
        "document.querySelector('#fig-curves').scrollIntoView({behavior: 'instant'});"
        "await new Promise(r => setTimeout(r, 100)); const t = performance.now();"
        "document.querySelector('.legend').click(); return performance.now() - t"
    )
    assert pressed < 500
    assert browser.complaints == []
