"""How strong are the tests? Breaks the source in one place at a time, and counts what the tests notice.

python tools/mutants.py --count 160 --out mutants.jsonl

Each line of the result is one mutant: where, what stood there and what stands there now, which tests ran, and whether
one of them failed. Called again with the same file it goes on where it stopped. The sample is drawn anew only where
the source changed: every module draws with a seed of its own. `--tree` names another checkout, an older commit's say,
and `--tests` the table that says which tests are meant to catch a mutant of which module; a word such as
TRITON_INTERPRET=1 among them is set in their environment.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
# Imported once, before the process that runs the tests of a mutant is forked off.
HEAVY = ["torch", "torch.distributed.tensor", "torch._dynamo", "numpy", "scipy.stats", "transformers"]


@dataclass(frozen=True)
class Mutant:
    module: str  # path below the package, "attention/couple.py"
    line: int
    start: int  # offsets into the module's text
    end: int
    kind: str
    before: str
    after: str


class Finder(ast.NodeVisitor):
    """Every place of a module where a small change should be noticed."""

    def __init__(self, module: str, text: str):
        self.module, self.text = module, text
        self.found: list[Mutant] = []
        # ast counts columns in bytes
        self.lines = [0]
        for line in text.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def add(self, node: ast.expr | ast.stmt, kind: str, new: ast.AST) -> None:
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = self.text.encode()[start:end].decode()
        after = ast.unparse(new)
        if isinstance(node, ast.expr):
            after = f"({after})"
        self.found.append(Mutant(self.module, node.lineno, start, end, kind, before, after))

    def visit_Compare(self, node: ast.Compare) -> None:
        swapped = [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
        self.add(node, "comparison", ast.Compare(node.left, swapped, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.add(node, "and/or", ast.BoolOp(SWAPPED[type(node.op)](), node.values))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(side, ast.Constant | ast.JoinedStr | ast.List | ast.Tuple) and not _is_number(side)
                    for side in (node.left, node.right))  # fmt: skip
        if type(node.op) in SWAPPED and not texts:
            self.add(node, "arithmetic", ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, "dropped not or minus", node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", ast.Constant(not node.value))
        elif isinstance(node.value, int) and abs(node.value) < 100:  # larger ones are limits and sizes of buffers
            self.add(node, "constant", ast.Constant(node.value + 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", ast.Constant(2 * node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "returned nothing", ast.Return(None))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "left out", ast.Pass())
        if not isinstance(node.value, ast.Constant):  # docstrings
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "left out", ast.Pass())
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "left out", ast.Pass())  # what the error says is no part of this

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in [*node.defaults, *node.kw_defaults]:
            if default is not None:
                self.visit(default)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)  # neither annotations nor decorators
        for statement in node.body:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts are not changed."""


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def find_mutants(package: Path) -> dict[str, list[Mutant]]:
    """Module → its mutants."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        finder = Finder(module, path.read_text(encoding="utf-8"))
        finder.visit(ast.parse(finder.text))
        found[module] = finder.found
    return found


def sample_mutants(package: Path, count: int, seed: int) -> Iterator[Mutant]:
    """`count` mutants, package by package in turn, so that a run cut short has seen all of them.

    Half of the sample is shared out equally over the packages, half by how many mutants each has; within a package
    the kinds of change take turns, else most would be of constants.
    """
    packages: dict[str, list[Mutant]] = {}
    for module, mutants in find_mutants(package).items():
        random.Random(f"{seed} {module}").shuffle(mutants)
        packages.setdefault(module.split("/")[0], []).extend(mutants)
    single = [name for name in packages if name.endswith(".py")]
    packages["(modules)"] = [mutant for name in single for mutant in packages.pop(name)]
    packages = {name: mutants for name, mutants in packages.items() if mutants}
    everything = sum(map(len, packages.values()))
    drawn = []
    for name, mutants in packages.items():
        random.Random(f"{seed} {name}").shuffle(mutants)
        mutants = _take_turns(mutants)
        share = round(count / 2 / len(packages) + count / 2 * len(mutants) / everything)
        drawn += [((i + 0.5) / share, name, mutant) for i, mutant in enumerate(mutants[:share])]
    for _, _, mutant in sorted(drawn, key=lambda entry: entry[:2]):
        yield mutant


def _take_turns(mutants: list[Mutant]) -> list[Mutant]:
    seen: Counter[str] = Counter()
    turn = {}
    for mutant in mutants:
        turn[mutant] = seen[mutant.kind]
        seen[mutant.kind] += 1
    return sorted(mutants, key=turn.__getitem__)


class Bench:
    """A copy of the source that one mutant at a time is put into, and the tests of `tree` run against it."""

    def __init__(self, tree: Path, table: dict[str, list[str]], folder: Path):
        self.tree, self.table, self.folder = tree, table, folder
        self.source = folder / "src"
        shutil.copytree(tree / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))

    def tests_of(self, module: str) -> list[str]:
        """The entry of the longest matching path of the table, else the folder of the package's tests."""
        matches = [path for path in self.table if module.startswith(path)]
        return self.table[max(matches, key=len)] if matches else [f"tests/{module.split('/')[0]}"]

    def run_tests(self, arguments: list[str], cpu_limit: int, limit: float) -> tuple[str, float]:
        """What came of the tests, and the CPU seconds they took, which other work on the machine does not change."""
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            self._become_pytest(arguments, cpu_limit)
        stopped = False
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            if not stopped and time.monotonic() - began > limit:
                stopped = True
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.1)
        with suppress(ProcessLookupError):  # what a test started and left behind
            os.killpg(child, signal.SIGKILL)
        _, status, used = done
        code = os.waitstatus_to_exitcode(status)
        outcome = "timeout" if stopped or code == -signal.SIGXCPU else "survived" if code == 0 else "killed"
        return outcome, used.ru_utime + used.ru_stime

    def _become_pytest(self, arguments: list[str], cpu_limit: int) -> None:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, cpu_limit + 5))
            os.chdir(self.tree)
            for stream in (1, 2):
                os.dup2(os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            os.environ |= {"PYTHONPATH": str(self.source), "XDG_CACHE_HOME": str(self.folder / "cache")}
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            quietly = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            quietly += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={self.folder / 'scratch'}"]
            variables = dict(word.split("=") for word in arguments if "=" in word)
            command = [*quietly, *(word for word in arguments if "=" not in word)]
            if variables:  # they must be there before anything is imported
                os.execve(sys.executable, [sys.executable, "-m", "pytest", *command], {**os.environ, **variables})
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(self.source))
            import pytest

            code = int(pytest.main(command))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def judge(self, mutant: Mutant, cpu_limit: int, limit: float) -> dict[str, Any]:
        tests = self.tests_of(mutant.module)
        path = self.source / "qklab" / mutant.module
        whole = path.read_bytes()
        path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
        try:
            outcome, seconds = self.run_tests(tests, cpu_limit, limit)
        finally:
            path.write_bytes(whole)
        return asdict(mutant) | {"tests": tests, "outcome": outcome, "cpu_seconds": round(seconds, 1)}

    def check_unbroken(self, rows: list[dict[str, Any]], cpu_limit: int, limit: float) -> None:
        """Tests that failed for every mutant must pass without one, else they prove nothing."""
        survived = {tuple(row["tests"]) for row in rows if row["outcome"] == "survived"}
        for tests in sorted({tuple(row["tests"]) for row in rows} - survived):
            outcome, seconds = self.run_tests(list(tests), cpu_limit, limit)
            print(
                f"{'passes' if outcome == 'survived' else 'FAILS'} unbroken, {seconds:.0f} s: {' '.join(tests)}",
                flush=True,
            )


def summarise(rows: list[dict[str, Any]]) -> str:
    """Per package: mutants, killed (a test that never ends counts as one that fails), survived."""
    packages: dict[str, list[dict[str, Any]]] = {"all": rows}
    for row in rows:
        name = row["module"].split("/")[0] if "/" in row["module"] else "(modules)"
        packages.setdefault(name, []).append(row)
    lines = []
    for name, own in packages.items():
        killed = sum(row["outcome"] != "survived" for row in own)
        lines.append(f"{name:12} {len(own):4} mutants {killed:4} killed {100 * killed / len(own):4.0f} %")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=here.parent, help="the checkout to break")
    parser.add_argument("--tests", type=Path, default=here / "mutants.toml", help="table: module → its tests")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-limit", type=int, default=150, help="CPU seconds after which tests count as hanging")
    parser.add_argument("--limit", type=float, default=600, help="the same by the clock")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the sample, for several at once")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args()

    tree = options.tree.resolve()
    drawn = list(sample_mutants(tree / "src/qklab", options.count, options.seed))
    part, parts = map(int, options.part.split("/"))
    drawn = drawn[part - 1 :: parts]
    if options.list:
        for mutant in drawn:
            print(f"{mutant.module}:{mutant.line}: {mutant.kind}: {mutant.before!r} → {mutant.after!r}")
        return
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(row["module"], row["start"], row["before"], row["after"]) for row in rows}
    for name in HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        bench = Bench(tree, tomllib.loads(options.tests.read_text(encoding="utf-8"))["tests"], Path(folder))
        for mutant in drawn:
            if (mutant.module, mutant.start, mutant.before, mutant.after) in known:
                continue
            row = bench.judge(mutant, options.cpu_limit, options.limit)
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), file=out, flush=True)
            change = f"{mutant.module}:{mutant.line}  {mutant.before!r} → {mutant.after!r}"
            print(f"{len(rows):4} {row['outcome']:9}{row['cpu_seconds']:6} s  {change}", flush=True)
        bench.check_unbroken(rows, options.cpu_limit, options.limit)
    print(summarise(rows))


if __name__ == "__main__":
    main()
