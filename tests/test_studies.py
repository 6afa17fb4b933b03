"""The study files: every published claim has one, small and full, and each is the set-up that it says it is."""

import re
from pathlib import Path

import pytest

from qklab.study.plan import count_runs
from qklab.study.spec import StudySpec, read_study
from qklab.train.spec import RunSpec

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "studies"
CLAIMS = [f"a{i}" for i in range(1, 10)] + [f"b{i}" for i in range(1, 9)] + ["c1", "c2", "c3"]
FILES = sorted(path.relative_to(STUDIES).as_posix() for path in STUDIES.rglob("*.toml"))


def study(name: str) -> StudySpec:
    return read_study(STUDIES / name)


def arm(name: str, which: str | None = None) -> RunSpec:
    found = study(name)
    return found.run(which or found.baseline, found.corpora[0], found.lrs[0], 0)


def parameters(name: str, which: str | None = None) -> int:
    return arm(name, which).model.parameters()


def test_every_claim_has_a_small_and_a_full_study():
    assert {f"{claim}.toml" for claim in CLAIMS} | {f"full/{claim}.toml" for claim in CLAIMS} <= set(FILES)
    assert {Path(name).stem.split("-")[0] for name in FILES} == set(CLAIMS)
    names = [study(name).name for name in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", FILES)
def test_a_study_file_says_what_it_is_about_and_resolves(name: str):
    text, found, stem = (STUDIES / name).read_text(encoding="utf-8"), study(name), Path(name).stem
    claim = stem.split("-")[0].upper()
    head = text.split("\n\n")[0].splitlines()
    assert all(line.startswith("#") and len(line) <= 120 for line in head)
    assert head[0].startswith(f"# {claim}: ")
    assert sum(line.startswith("# Published: ") for line in head) == 1
    assert sum(line.startswith("# Source: ") and "(arXiv 2" in line for line in head) == 1
    assert f"#     qklab study studies/{name} --out runs/{name[:-5].replace('/', '-')}" in text
    assert found.name.startswith(claim)
    for which in found.arms:
        for corpus in found.corpora:
            for lr in found.lrs:
                run = found.run(which, corpus, lr, 0)
                assert (run.corpus.source, run.optimiser.lr) == (corpus, lr)
    tokens_a_step = {found.run(which, found.corpora[0], found.lrs[0], 0).tokens_per_step for which in found.arms}
    assert len(tokens_a_step) == 1


@pytest.mark.parametrize("name", [name for name in FILES if "/" not in name])
def test_a_small_study_takes_minutes(name: str):
    found = study(name)
    runs = count_runs(found)
    run = arm(name)
    assert runs <= (150 if found.metric == "accuracy" else 25)  # on short sequences, which take seconds each
    assert max(parameters(name, which) for which in found.arms) < 2_000_000
    assert (run.budget.tokens or 0) <= 300_000
    assert (run.budget.seconds or 0.0) <= 60.0
    assert found.corpora[0] == "stdlib" or all(corpus.startswith("task:") for corpus in found.corpora)
    assert found.seeds >= 2


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("full/a1.toml", 59.3),
        ("full/a5.toml", 151.9),
        ("full/a6.toml", 353.6),
        ("full/a8.toml", 59.3),
        ("full/a9.toml", 454.2),
        ("full/a9-150m.toml", 151.9),
        ("full/b1.toml", 305.5),
        ("full/b6.toml", 1215.1),
        ("full/c1.toml", 1042.6),
    ],
)
def test_full_studies_have_the_published_sizes(name: str, millions: float):
    assert parameters(name) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "which", "saved"),
    [
        ("full/b1.toml", "k=v", 50.0),
        ("full/b2.toml", "q=k", 0.0),
        ("full/b3.toml", "q=k=v", 50.0),
        ("full/b4.toml", "gqa", 75.0),
        ("full/b4.toml", "mqa", 93.8),
        ("full/b4.toml", "k=v+gqa", 87.5),
        ("full/b4.toml", "k=v+mqa", 96.9),
        ("b4.toml", "gqa", 75.0),
        ("b6.toml", "gqa", 75.0),
        ("full/b6.toml", "gqa", 75.0),
    ],
)
def test_caches_are_as_small_as_published(name: str, which: str, saved: float):
    ratio = arm(name, which).model.cache_bytes(1) / arm(name).model.cache_bytes(1)
    assert 100 * (1 - ratio) == pytest.approx(saved, abs=0.06)


def test_the_published_set_ups():
    assert parameters("full/a2.toml", "uncoupled") == pytest.approx(parameters("full/a2.toml", "leapfrog"), rel=1e-4)
    assert parameters("a2.toml", "uncoupled") == pytest.approx(parameters("a2.toml", "leapfrog"), rel=1e-4)
    steps = [arm("full/a3.toml", which).model.pattern[0].coupling for which in study("full/a3.toml").arms]
    assert [coupling.steps for coupling in steps if coupling is not None] == [1, 2, 3, 5, 7]
    more = parameters("full/a9.toml", "differential-affine") / parameters("full/a9.toml") - 1
    assert more == pytest.approx(0.003, abs=0.0005)
    assert study("full/a9.toml").seeds == study("full/a9-150m.toml").seeds == 6
    assert study("a4.toml").match == study("full/a4.toml").match == "seconds"
    contexts = [arm(f"full/b5{tail}.toml").model.context for tail in ("-512", "-1024", "")]
    assert contexts == [512, 1024, 2048]
    assert len({arm(f"full/b5{tail}.toml").tokens_per_step for tail in ("-512", "-1024", "")}) == 1
    assert arm("b5.toml").tokens_per_step == arm("b5-64.toml").tokens_per_step
    for name, lr, layers, heads in (("full/b1.toml", 2e-4, 20, 16), ("full/b6.toml", 6e-5, 22, 32)):
        run = arm(name)
        assert (run.optimiser.lr, run.model.layers, run.model.pattern[0].heads) == (lr, layers, heads)
        assert (run.model.vocab, run.model.context, run.model.pattern[0].position) == (50_304, 2048, "learned")
        assert (run.optimiser.beta2, run.optimiser.weight_decay, run.optimiser.clip) == (0.95, 0.1, 1.0)
        assert (run.schedule.kind, run.schedule.final, run.budget.tokens) == ("cosine", 0.1, 10_000_000_000)
    for name in ("full/c1.toml", "full/c2.toml", "full/c3.toml"):
        run = arm(name)
        assert (run.tokens_per_step, run.steps, run.optimiser.kind) == (196_608, 5000, "muon")
        assert (run.schedule.kind, 5000 * run.schedule.warmup) == ("constant", 500)
        assert (run.model.layers, run.model.width, run.model.pattern[0].heads) == (14, 2048, 32)
        assert run.model.pattern[0].head_width == 64
        assert study(name).lrs == [3e-4, 3e-3, 3e-2]
        taus = {arm(name, which).logit_control.tau for which in study(name).arms if which.startswith("quack")}
        assert taus == {0.01, 0.1, 1.0, 10.0}
    latent = arm("full/c2.toml").model.pattern[0].latent
    assert latent is not None
    assert (latent.query_rank, latent.kv_rank, latent.rope_width) == (512, 256, 64)


def test_the_published_tasks():
    found = read_study(STUDIES / "full/b8.toml")
    assert [corpus.removeprefix("task:") for corpus in found.corpora] == ["reverse", "sort", "swap", "sub", "copy"]
    assert (len(found.arms), found.seeds, found.metric) == (6, 5, "accuracy")
    assert {1e-4, 1e-3} <= set(found.lrs)
    for which in found.arms:
        run = found.run(which, "task:sort", 1e-3, 0)
        assert run.task is not None
        assert (run.task.length, run.task.train, run.task.valid, run.task.test) == (64, 50_000, 1_000, 10_000)
        assert run.steps == -(-2 * 50_000 // 128)
        assert (run.model.causal, run.model.norm_place, run.model.dropout) == (False, "post", 0.1)
    assert sum(found.run(which, "task:sort", 1e-3, 0).model.pattern[0].asymmetry_2d for which in found.arms) == 2


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_the_tasks_as_the_authors_released_them(width: int):
    found = read_study(ROOT / f"evidence/b8-2x{width}/study.toml")
    names = [corpus.removeprefix("task:").partition("?")[0] for corpus in found.corpora]
    assert names == ["reverse", "sort", "swap", "sub", "copy"]
    assert (len(found.arms), found.seeds, found.metric, 1e-3 in found.lrs) == (6, 5, "accuracy", True)
    for which in found.arms:
        run = found.run(which, found.corpora[0], 1e-3, 0)
        assert run.task is not None
        assert (run.task.length, run.task.train, run.task.test) == (16, 10_000, 2_000)
        assert run.steps == 2 * -(-10_000 // 128)
        assert (run.model.width, run.model.layers, run.model.norm_place, run.model.dropout) == (width, 2, "pre", 0.0)


@pytest.mark.parametrize("claim", ["a4", "a8"])
def test_what_cannot_be_done_yet_is_said(claim: str):
    for name in (f"{claim}.toml", f"full/{claim}.toml"):
        assert "Missing: " in (STUDIES / name).read_text(encoding="utf-8")


def test_the_readme_lists_every_file_once():
    text = (STUDIES / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)]+\.toml)\)", text)
    assert sorted(linked) == FILES
    rows = [line for line in text.splitlines() if re.match(r"\| [ABC]\d \|", line)]
    assert [row[2:4].lower() for row in rows] == CLAIMS
    for row in rows:
        claim = row[2:4].lower()
        assert f"`qklab study studies/{claim}.toml --out runs/{claim}" in row
