"""The report in headless Chromium: nothing goes wrong, nothing leaves it, and what can be pressed does something."""

import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import Browser
from fabricated import fabricate, fabricate_difficulties, make_attention, spec

from qklab import register
from qklab.report import build_report
from qklab.report.build import render_report
from qklab.report.data import gather_data
from qklab.report.serve import ReportServer
from qklab.study.metrics import Metric
from qklab.study.plan import PlannedRun

ACROSS = ("sizes", "compute", "speed-up", "corpora", "difficulty")
FIGURES = ("forest", *ACROSS, "curves", "rates", "cost", "entropy", "sink", "maps", "logits")


def draw_marks(browser: Browser) -> dict[str, str]:
    """Everything drawn in every figure, as text to compare."""
    browser.scroll_through()
    script = "return [...document.querySelectorAll('#fig-{} .mark')].map(m => m.outerHTML).join('')"
    return {figure: browser.run(script.format(figure)) for figure in FIGURES}


def picture_of(browser: Browser, figure: str) -> str:
    """A figure with its axes, brought into view: another unit may move these alone."""
    browser.run(f"document.getElementById('{figure}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.settle()
    return browser.run(f"return document.querySelector('#{figure} svg').innerHTML")


def text_of(browser: Browser, selector: str) -> str:
    return browser.run(f"return document.querySelector('{selector}').textContent")


def test_every_figure_is_drawn_when_it_comes_into_view_and_nothing_is_asked_for(browser: Browser, report: Path) -> None:
    browser.open(report.as_uri(), height=500)
    assert browser.run("return document.querySelector('#fig-logits svg') === null")
    browser.scroll_through()
    for figure in FIGURES:
        assert browser.run(f"return document.querySelectorAll('#fig-{figure} svg .mark').length") >= 5, figure
        assert "NaN" not in browser.run(f"return document.querySelector('#fig-{figure} svg').outerHTML"), figure
    assert browser.run("return document.querySelectorAll('section').length") == 14
    assert browser.complaints == []
    assert browser.requests == [report.as_uri()]
    said = browser.run("try { await fetch('http://127.0.0.1:9/'); return 'sent' } catch (e) { return 'refused' }")
    assert said == "refused"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_hiding_an_arm_takes_it_out_of_every_figure_and_back(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    before = draw_marks(browser)
    browser.click('.legend[data-arm="1"]')
    assert browser.run("return document.querySelector('.legend[data-arm=\"1\"]').ariaPressed") == "false"
    for figure, marks in draw_marks(browser).items():
        assert 'data-arm="1"' in before[figure], figure
        assert 'data-arm="1"' not in marks, figure
    browser.click('.legend[data-arm="1"]')
    assert draw_marks(browser) == before
    for k in range(5):
        browser.click(f'.legend[data-arm="{k}"]')
    assert "".join(draw_marks(browser).values()) == ""
    assert browser.complaints == []


def test_every_switch_changes_its_figure(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    switches = browser.run(
        "return [...document.querySelectorAll('figure button[aria-pressed=false]')]"
        ".filter(b => b.offsetParent).map(b => [b.closest('figure').id, b.dataset.control, b.dataset.value])"
    )
    expected = ["curves x seconds", "curves scale log", "logits scale log", "cost x step", "forest unit exponential"]
    assert {f"fig-{switch}" for switch in expected} <= {" ".join(switch) for switch in switches}
    for figure, control, value in switches:
        back = f"return document.querySelector('#{figure} [data-control={control}][aria-pressed=true]').dataset.value"
        before, was = picture_of(browser, figure), browser.run(back)
        browser.click(f'#{figure} [data-control={control}][data-value="{value}"]')
        assert picture_of(browser, figure) != before, (figure, control, value)
        assert browser.run(f"return document.querySelectorAll('#{figure} .mark').length") > 0
        browser.click(f'#{figure} [data-control={control}][data-value="{was}"]')
        assert picture_of(browser, figure) == before, (figure, control, value)
    count = "return document.querySelectorAll('#fig-curves .mark[transform]').length"
    picture_of(browser, "fig-curves")
    ten = browser.run(count)
    browser.click('#fig-curves [data-control=range][data-value="end"]')
    picture_of(browser, "fig-curves")
    assert 0 < browser.run(count) < ten  # evaluations of the second half
    for figure in ("fig-entropy", "fig-logits", "fig-maps"):
        before = picture_of(browser, figure)
        browser.run(
            f"const s = document.querySelector('#{figure} select'); s.selectedIndex = 1;"
            "s.dispatchEvent(new Event('change'))"
        )
        is_same = picture_of(browser, figure) == before
        assert is_same == (figure == "fig-maps"), figure  # the made-up heads are all alike
    assert browser.complaints == []


def test_the_other_corpus_can_be_shown(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    browser.click('[data-group="1"]')
    browser.scroll_through()
    assert browser.run("return document.querySelector('[data-group=\"1\"]').ariaSelected") == "true"
    assert "novels" in text_of(browser, "#fig-curves svg title")
    assert browser.run("return document.querySelectorAll('.answer').length") == 2 + 1  # the mean over another's corpora


def test_scores_stand_against_difficulty_beside_chance_and_the_mean_over_tasks_is_judged(
    browser: Browser, tmp_path: Path
) -> None:
    folder = fabricate_difficulties(tmp_path / "s")
    browser.show_all(build_report([folder], tmp_path / "r.html").as_uri())
    picture = "#fig-difficulty svg"
    labels = browser.run(f"return [...document.querySelectorAll('{picture} text')].map(t => t.textContent)")
    assert [label for label in labels if label in ("4", "8", "16")][:3] == ["4", "8", "16"]
    assert {"pairs", "accuracy, % of the answers right", "standard", "k=v"} <= {*labels}
    dotted = browser.run(f"return document.querySelector('{picture} [stroke-dasharray=\"2 4\"]').getAttribute('d')")
    heights = [float(point.split(",")[1]) for point in dotted.removeprefix("M").split("L")]
    assert heights == sorted(heights, reverse=True)  # chance rises with the pairs of these runs
    for arm in range(5):
        marks = browser.run(
            f"return [...document.querySelectorAll('{picture} .mark[transform][data-arm=\"{arm}\"]')]"
            ".map(m => m.getBoundingClientRect().y)"
        )
        assert len(marks) == 3
        assert marks == sorted(marks)  # each less accurate than the one before
    last = browser.run("return [...document.querySelectorAll('.answer .headline')].at(-1).textContent")
    assert last.startswith("On the mean of 3 corpora, leapfrog")
    assert "% of the answers right on average: standard" in text_of(browser, "#verdict")
    (own,) = gather_data([folder])["across"]
    assert "their mean" in text_of(browser, "#fig-corpora svg")
    paired = own["averages"][0]["verdicts"]["k=v"]["paired"]
    each = [effect["effect"]["estimate"] for row in own["corpora"] if row["arm"] == "k=v" for effect in row["effects"]]
    assert paired["mean"] == pytest.approx(sum(each) / 3)
    assert browser.complaints == []


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, report: Path) -> None:
    def is_light() -> bool:
        browser.settle()
        colour = browser.run("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3 > 200

    browser.show_all(report.as_uri())
    light = draw_marks(browser)["curves"]
    assert is_light()
    browser.dark(True)
    assert not is_light()
    assert draw_marks(browser)["curves"] != light
    browser.click("#theme")
    assert is_light()
    assert draw_marks(browser)["curves"] == light
    browser.click("#theme")
    browser.dark(False)  # what the button said stays
    assert not is_light()


def test_no_width_scrolls_sideways(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    for width in (320, 390, 768, 1600):
        browser.resize(width)
        browser.scroll_through()
        assert browser.run("return document.documentElement.scrollWidth") <= width
        outside = browser.run(
            "return [...document.querySelectorAll('figure svg text')].filter(t => {"
            " const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
            " return a.left < b.left - 1 || a.right > b.right + 1 })"
            ".map(t => t.closest('figure').id + ': ' + t.textContent)"
        )
        assert outside == []


def test_marks_tell_their_numbers_by_mouse_and_by_keyboard(browser: Browser, report: Path) -> None:
    browser.show_all(report.as_uri())
    is_hidden = "return document.getElementById('tip').hidden"
    box = browser.run(
        "const m = document.querySelector('#fig-forest .mark');"
        "m.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const b = m.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    browser.hover(*box)
    assert "nats per token" in text_of(browser, "#tip")
    browser.hover(2, 2)
    assert browser.run(is_hidden) is True
    for figure in FIGURES:
        browser.run(
            f"const s = document.querySelector('#fig-{figure} svg[tabindex]');"
            "s.scrollIntoView({block: 'center', behavior: 'instant'}); s.focus({preventScroll: true})"
        )
        browser.settle()
        browser.key("ArrowRight")
        browser.settle()
        assert text_of(browser, "#tip"), figure
        assert browser.run(is_hidden) is False, figure
        browser.key("Escape")
        assert browser.run(is_hidden) is True, figure


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
            assert (width >= 600, height >= 400, len(set(content[64:])) > 100) == (True, True, True)
    ledger = next(path for path in saved if path.name.endswith("ledger.csv")).read_text().splitlines()
    assert ledger[0].startswith("arm,learning_rate,learning_rates_tried,learning_rates_among_which")
    assert ledger[2].startswith("k=v,0.003,0.001 0.003,,0.02499")
    runs = next(path for path in saved if path.name.endswith("runs.csv")).read_text().splitlines()
    assert len(runs) == 1 + 20
    assert "test_bits_per_byte" in runs[0]
    assert "0123456789abcdef0123456789abcdef01234567" in runs[1]
    assert browser.complaints == []


def test_names_are_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    data = gather_data([fabricate(tmp_path / "s", spec(seeds=1, lrs=[1e-3]), steps=20)])
    wild = "<img src=x onerror=document.title='owned'>"
    data["groups"][0] |= {"corpus": wild, "headline": wild, "notes": [wild], "settling": wild, "command": wild}
    data["groups"][0]["arms"][1]["name"] = wild
    (tmp_path / "r.html").write_text(render_report(data), encoding="utf-8")
    browser.show_all((tmp_path / "r.html").as_uri())
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run("return document.title") != "owned"
    assert browser.complaints == []


@pytest.fixture
def accuracy() -> Iterator[str]:
    """A metric of another package, of which more is better."""

    @register.metric("share_correct")
    class Accuracy(Metric):
        label, unit, difference_unit = "accuracy", "share correct", "share correct"
        lower_is_better = False

        def read(self, evaluation: Mapping[str, Any]) -> float:
            return 1 - float(evaluation["loss"]) / 10

    yield "share_correct"
    del register.metric.entries["share_correct"]


def test_a_metric_of_another_package_has_its_own_name_unit_and_direction(
    browser: Browser, tmp_path: Path, accuracy: str
) -> None:
    folder = fabricate(tmp_path / "s", spec(metric=accuracy, margin=1e-4), steps=20)
    browser.show_all(build_report([folder], tmp_path / "r.html").as_uri())
    assert "share correct on test text, higher is better" in text_of(browser, ".measure")
    assert "right of 0 is better" in text_of(browser, "#fig-forest")
    assert "difference to standard, share correct" in text_of(browser, "#fig-forest svg")
    for figure in ("curves", "rates", "cost"):
        assert "accuracy, share correct" in text_of(browser, f"#fig-{figure} svg"), figure
    assert "Up and left is better" in text_of(browser, "#fig-cost")
    assert "accuracy, share correct" in text_of(browser, "#table-facts")
    words = browser.run("return [...document.querySelectorAll('.arms .chip')].map(e => e.textContent)")
    assert words[:3] == ["baseline", "worse", "better"]
    assert browser.complaints == []


def test_one_seed_no_run_and_no_study_are_said_plainly(browser: Browser, tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "one", spec(seeds=1), steps=20)
    browser.show_all(build_report([folder], tmp_path / "one.html").as_uri())
    assert "anecdote" in text_of(browser, "#fig-forest")
    assert browser.run("return document.querySelectorAll('#fig-forest .interval').length") == 0
    assert browser.complaints == []
    (tmp_path / "none").mkdir()
    shutil.move(folder / "study.json", tmp_path / "none" / "study.json")
    browser.show_all(build_report([tmp_path / "none"], tmp_path / "none.html").as_uri())
    assert "Nothing to compare" in text_of(browser, ".headline")
    assert browser.complaints == []
    browser.show_all(build_report([folder], tmp_path / "r.html").as_uri())
    assert "no study" in text_of(browser, "#verdict")
    assert browser.run("return document.querySelectorAll('#fig-curves .mark').length") > 5
    assert browser.complaints == []


def test_the_served_page_reloads_when_a_run_has_news_and_keeps_what_was_hidden(
    browser: Browser, tmp_path: Path
) -> None:
    study = spec(seeds=1, lrs=[1e-3])
    last = PlannedRun("stdlib", "qk-norm", 1e-3, 0)
    folder = fabricate(tmp_path / "s", study, steps=20, unfinished=(last,))
    with ReportServer([folder], 0, every=0.1) as server:
        browser.open(server.address)
        assert "4 of 5 runs have ended" in text_of(browser, ".answer")
        browser.click('.legend[data-arm="1"]')
        shutil.rmtree(last.folder_in(folder))
        fabricate(folder, study, steps=20, only=last)
        until = time.monotonic() + 30
        while "4 of 5 runs" in browser.run("return document.querySelector('.answer')?.textContent ?? '4 of 5 runs'"):
            assert time.monotonic() < until
            time.sleep(0.1)
        browser.settle()
        assert browser.run("return document.querySelector('.legend[data-arm=\"1\"]').ariaPressed") == "false"
        assert {url.removeprefix(server.address) for url in browser.requests} == {"", "version"}
        assert browser.complaints == []
        browser.open("about:blank")


def test_three_hundred_runs_load_at_once_and_stay_small(browser: Browser, tmp_path: Path, folder: Path) -> None:
    data = gather_data([folder])
    (group,) = data["groups"]
    group["runs"] = [run | {"seed": run["seed"] + 3 * k, "shown": True} for k in range(15) for run in group["runs"]]
    known = {run["arm"]: run for run in group["runs"] if run["train"]}
    group["runs"] = [known[run["arm"]] | {"seed": run["seed"], "lr": run["lr"]} for run in group["runs"]]
    group["attention"] = {arm["name"]: make_attention() for arm in group["arms"]}
    assert len(group["runs"]) == 300
    path = tmp_path / "r.html"
    path.write_text(render_report(data), encoding="utf-8")
    assert path.stat().st_size < 5e6
    assert min(browser.open(path.as_uri()) for _ in range(2)) < 2
    browser.scroll_through()
    assert browser.run("return document.querySelectorAll('figure svg').length") == len(FIGURES) - len(ACROSS)
    pressed = browser.run(
        "document.querySelector('#fig-curves').scrollIntoView({behavior: 'instant'});"
        "await new Promise(r => setTimeout(r, 100)); const t = performance.now();"
        "document.querySelector('.legend').click(); return performance.now() - t"
    )
    assert pressed < 500
    assert browser.complaints == []
