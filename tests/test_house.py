"""The laws of the house that no linter knows: one home per idea, names that are plain and mean one thing."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from qklab import register

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/qklab"
MODULES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}

# Participles that do not end like one, and words that end like one but are none (verbs, or nouns of the field).
IRREGULAR = {"told", "chosen", "kept", "held", "said", "sent", "built", "made", "known", "left", "bound", "lost"}
NO_PARTICIPLE = {"seed", "speed", "feed", "need", "embed", "open", "listen", "hidden", "len", "uncoupled"}


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word in IRREGULAR or (bool(re.fullmatch("[a-z]+(ed|en|wn)", word)) and word not in NO_PARTICIPLE)


def functions_of(module: str) -> Iterator[str]:
    """Functions and methods, but not properties, which may say how a thing is."""
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list):
            yield node.name


def list_definitions(module: str) -> Iterator[str]:
    """Functions, classes and named types."""
    for node in parse(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and re.match("[A-Z][a-z]", t.id))


def test_a_public_name_means_one_thing() -> None:
    homes = defaultdict(set)
    for module in MODULES:
        for name in list_definitions(module):
            if not name.startswith("_"):
                # an operation's reference and kernels bear its name
                operation = re.match("ops/[a-z_]+/", module)
                homes[name].add(operation[0] if operation else module)
    shared = {name: sorted(found) for name, found in homes.items() if len(found) > 1 and name != "main"}
    assert not shared, f"defined twice; rename one: {shared}"


def test_functions_are_verbs_with_their_object() -> None:
    found = {f"{module}: {name}" for module in MODULES for name in functions_of(module) if is_participle(name)}
    assert not found, f"participles; name what the function does (`write_json`, not `written`): {found}"


@pytest.mark.parametrize("registry", [register.coupling, register.mix, register.norm], ids=lambda r: r.what)
def test_mechanisms_are_listed_in_their_home_alone(registry: register.Registry) -> None:
    """A second list is a second place to change: whoever needs the names reads the registry."""
    names, homes = set(registry), {"attention/couple.py", "attention/mix.py", "attention/norm.py"}
    for module in set(MODULES) - homes:
        for node in ast.walk(parse(module)):
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                inside = node.keys if isinstance(node, ast.Dict) else node.elts
                listed = {str(entry.value) for entry in inside if isinstance(entry, ast.Constant)} & names
                assert len(listed) < 3, f"{module}:{node.lineno} lists {', '.join(sorted(listed))}"


# The words by which Transformers' models call their parts.
LAYOUTS = re.compile(r"[\"'.](q_proj|k_proj|v_proj|qkv_proj|o_proj|c_attn|query_key_value|self_attn|kv_a_proj\w*)\b")


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith("hf/")])
def test_only_hf_knows_other_peoples_layouts(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert not LAYOUTS.findall(text)
    assert not re.findall(r"^\s*(?:from|import) transformers", text, re.MULTILINE)


# What CONTRIBUTING.md says is to be touched, and how many files that may be besides a page and its drawing.
MOST_FILES = {
    "coupling with a kernel": 8,
    "mask, such as a stride": 6,
    "metric of a study": 3,
    "corpus source": 3,
    "Transformers family": 2,
}


def files_to_touch() -> dict[str, list[str]]:
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE
    )
    return {
        what: [name for name in re.findall("`([^`]+)`", files) if name != "docs/mechanisms/"] for what, files in rows
    }


@pytest.mark.parametrize("what", MOST_FILES)
def test_adding_something_touches_few_files(what: str) -> None:
    files = files_to_touch()[what]
    assert len(files) <= MOST_FILES[what]
    assert not [name for name in files if not (ROOT / name).is_file()]


def test_a_coupling_with_a_kernel_is_named_nowhere_else() -> None:
    """One that is there stands for the next: where the source names it is where the next one must be added."""
    named = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".md", ".js") and re.search("symplectic[-_]?euler", path.read_text("utf-8"), re.I)
    }
    assert named - set(files_to_touch()["coupling with a kernel"]) == set()


def test_test_files_are_told_apart_by_name() -> None:
    """pytest imports them by that name alone, and would stop before the first test."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}


STRIDED = """
import torch
from qklab import Attention, AttentionSpec
from qklab.testing import CONTRACTS, contracts_of
from qklab.testing.grid import SIZE
for choices in ({"kv_heads": 2}, {"share": "k=v", "kv_rotation": "on-read"}, {"mix": "differential", "causal": False}):
    spec = AttentionSpec(**SIZE, **choices, stride=2)
    for name in contracts_of(spec):
        if name != "compilation":
            CONTRACTS[name](spec, "cpu")
attention, x = Attention(AttentionSpec(**SIZE, stride=2)), torch.randn(1, 6, 8)
changed = torch.cat([x[:, :1] + 1, x[:, 1:]], 1)
assert [bool((attention(x) != attention(changed))[:, t].any()) for t in range(6)] == [True, False] * 3
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("git") is None, reason="the patch is applied by git")
def test_a_stride_is_the_patch_that_the_table_says(tmp_path: Path) -> None:
    """tests/stride.patch adds one. Where it no longer applies, the lines it changes have moved: mend it there."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    patch = ROOT / "tests/stride.patch"
    applied = subprocess.run(["git", "apply", "-C1", patch], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, applied.stderr
    touched = set(re.findall(r"^\+\+\+ b/(.*)$", patch.read_text("utf-8"), re.MULTILINE))
    assert touched <= set(files_to_touch()["mask, such as a stride"])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    ran = subprocess.run([sys.executable, "-c", STRIDED], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_mutants_are_sent_to_tests_that_exist() -> None:
    table = tomllib.loads((ROOT / "tools/mutants.toml").read_text("utf-8"))["tests"]
    paths = {word.split("::")[0] for words in table.values() for word in words if word.startswith("tests/")}
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert not [start for start in table if not any(module.startswith(start) for module in MODULES)]
