"""Loss curves of `nano` that later versions must reproduce: `python tests/train/golden.py` writes them anew."""

import json
import tempfile
from pathlib import Path
from typing import Any

from tiny import tiny

from qklab.runs import RunDirectory
from qklab.train.launch import train

FOLDER = Path(__file__).parents[1] / "golden"
STEPS = 20
ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "leapfrog": {"coupling": {"kind": "leapfrog"}},
    "k=v": {"share": "k=v"},
    "differential": {"mix": "differential"},
    "mla": {"latent": {"query_rank": 64, "kv_rank": 32, "rope_width": 16}},
}
NANO: dict[str, Any] = {
    "model": {"layers": 4, "width": 128, "context": 64, "mlp_ratio": 4.0},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * 64 * STEPS},
    "evaluation": {"times": 1, "tokens": 10**6, "probes": 0},
}


def curve(corpus: Path, arm: str, folder: Path) -> dict[str, Any]:
    """Training losses and the final evaluation of one arm."""
    spec, execution = tiny(corpus, **NANO, attention={"heads": 4} | ARMS[arm])
    summary = train(spec, folder, execution).summary
    assert summary is not None
    losses = [round(record["loss"], 6) for record in RunDirectory(folder).metrics("train")]
    return {"loss": losses, "valid": round(summary["evaluation"]["valid"]["loss"], 6)}


if __name__ == "__main__":
    from conftest import prepared_licence  # pyright: ignore[reportAttributeAccessIssue]

    with tempfile.TemporaryDirectory() as scratch:
        corpus = prepared_licence(Path(scratch))
        for arm in ARMS:
            path = FOLDER / f"nano-{arm}.json"
            path.write_text(json.dumps(curve(corpus, arm, Path(scratch) / arm)) + "\n")
            print(path.name, path.read_text()[:100])
