"""The bounds that the kernels are held to, with what was measured beside each.

    python benchmarks/bounds.py            # on a GPU: measure (about a quarter of an hour), then the table
    python benchmarks/bounds.py --kept     # the table from the result files under benchmarks/results

Without a GPU nothing can be measured; then the kept results are shown, with the machine they come from.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from measure import RESULTS

HERE = Path(__file__).parent

# result file (without its ending) → the command that makes it
COMMANDS: dict[str, list[str]] = {
    "coupling-step-51m-h200": ["coupling.py", "step", "--model", "51m", "--fused-only", "--name", "51m-h200"],
    "coupling-step-51m-recompute-h200": [
        "coupling.py", "step", "--model", "51m", "--fused-only", "--recompute", "--name", "51m-recompute-h200",
        "--arms", "leapfrog×7",
    ],
    "coupling-step-51m-heads4-h200": [
        "coupling.py", "step", "--model", "51m", "--heads", "4", "--fused-only", "--name", "51m-heads4-h200",
    ],
    "coupling-step-124m-h200": [
        "coupling.py", "step", "--model", "124m", "--batch", "32", "--fused-only", "--name", "124m-h200",
    ],
    "coupling-op-h200": ["coupling.py", "op", "--name", "h200"],
    "decode-h200": ["decode.py", "--no-crossing"],
}  # fmt: skip
Result = dict[str, Any]
Read = Callable[[Result], float]


class Bound(NamedTuple):
    """One line of the table."""

    what: str
    file: str
    read: Read
    limit: float
    least: bool = False  # the limit is a lower one


def step(arm: str, key: str = "ratio", way: str = "fused") -> Read:
    return lambda kept: kept["arms"][f"{arm}, {way}"][key]


def decoding(problem: str, arm: str) -> Read:
    return lambda kept: kept["problems"][problem]["arms"][arm]["ms"]


def fastest(problem: str) -> Read:
    """Milliseconds of the fastest of torch's backends and FlexAttention."""

    def read(kept: Result) -> float:
        arms = kept["problems"][problem]["arms"]
        return min(row["ms"] for name, row in arms.items() if name.startswith(("torch", "flex")))

    return read


def floor(problem: str) -> Read:
    return lambda kept: kept["problems"][problem]["floor_ms"]


def over(top: Read, bottom: Read) -> Read:
    return lambda kept: top(kept) / bottom(kept)


def copy_share(kept: Result) -> float:
    row = kept["arms"]["leapfrog×1, heads of 64"]
    return row["floors_s"][0] / row["forward_s"]


def bounds() -> list[Bound]:
    rows = []
    for size in ("51m", "124m"):
        file = f"coupling-step-{size}-h200"
        for arm, limit in (("euler×1", 1.02), ("leapfrog×1", 1.03), ("leapfrog×7", 1.10), ("affine×1", 1.03)):
            rows.append(Bound(f"training step, {size.upper()}, {arm} / standard", file, step(arm), limit))
    memory = step("leapfrog×7", "peak_ratio")
    rows.append(Bound("peak memory, 51M, leapfrog×7 / standard", "coupling-step-51m-h200", memory, 1.03))
    again = step("leapfrog×7", "peak_ratio", "fused, recomputed")
    rows.append(Bound("… with recompute='coupling'", "coupling-step-51m-recompute-h200", again, 1.03))
    wide = "coupling-step-51m-heads4-h200"
    for arm, limit in (("leapfrog×1", 1.05), ("leapfrog×7", 1.17)):
        rows.append(Bound(f"training step, heads of 128, {arm} / standard", wide, step(arm), limit))
    shared, separate, ragged = (decoding(problem, "ours auto") for problem in ("shared", "separate", "ragged"))
    usual = decoding("separate", "torch default")
    for what, read, limit in (
        ("(Q,K=V) / fastest (Q,K,V)", over(fastest("separate"), shared), 1.76),
        ("(Q,K=V), of the read floor", over(floor("shared"), shared), 0.88),
        ("(Q,K,V) / torch's default", over(usual, separate), 1.6),
        ("(Q,K,V) / torch's fastest", over(fastest("separate"), separate), 1.0),
        ("ragged (Q,K=V) / torch with a mask", over(fastest("ragged"), ragged), 1.5),
    ):
        rows.append(Bound(f"decode, {what}", "decode-h200", read, limit, least=True))
    alone = "coupling alone, leapfrog×1, forward, of copy bandwidth"
    return [*rows, Bound(alone, "coupling-op-h200", copy_share, 0.75, least=True)]


def measure(folder: Path) -> None:
    """Run every benchmark into `folder`; one that fails is named, and the others go on."""
    for name, command in COMMANDS.items():
        print(f"== {' '.join(command)}", flush=True)
        program = [sys.executable, str(HERE / command[0]), *command[1:], "--out", str(folder)]
        if subprocess.run(program, check=False).returncode:
            print(f"{name}: the benchmark failed, so its lines stay empty.", file=sys.stderr)
    for path in folder.glob("decode-*.json"):
        path.rename(folder / "decode-h200.json")


def lines(folder: Path) -> list[str]:
    """The table, one line a bound."""
    found: dict[str, Result] = {}
    for path in folder.glob("*.json"):
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    told = [f"{'':<56}{'bound':>8}{'measured':>10}"]
    for bound in bounds():
        limit = f"{'≥' if bound.least else '≤'} {bound.limit:.2f}"
        try:
            value = bound.read(found[bound.file])
        except KeyError:
            told.append(f"{bound.what:<56}{limit:>8}{'–':>10}  not measured")
            continue
        held = value >= bound.limit if bound.least else value <= bound.limit
        told.append(f"{bound.what:<56}{limit:>8}{value:>10.3f}  {'held' if held else 'missed'}")
    for name in sorted({bound.file for bound in bounds()} & found.keys()):
        origin = found[name]["provenance"]
        told.append(
            f"{name}.json: {origin['device']}, commit {origin['commit']}, {origin['date']}, torch {origin['torch']}"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, help="folder for the result files that are measured; a temporary one")
    options = parser.parse_args()
    if options.kept or not torch.cuda.is_available():
        if not options.kept:
            print("There is no GPU here, so none of these can be measured; kept results:")
        print("\n".join(lines(RESULTS)))
        return
    with tempfile.TemporaryDirectory() as folder:
        where = options.out or Path(folder)
        measure(where)
        print("\n".join(lines(where)))


if __name__ == "__main__":
    main()
