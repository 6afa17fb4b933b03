"""What probes say of a study's models before their first step: python evidence/initial.py evidence/NAME --data CORPORA

For every arm and seed that is kept, the model as it was initialised is probed on the text on which it was while it
trained, and averaged over heads as keep.py does: a line of initial.jsonl each. No learning rate matters yet.
"""

import argparse
import json
from pathlib import Path

from keep import average_heads
from records import read_records

from qklab.data.prepare import prepare_corpus
from qklab.model.decoder import Decoder
from qklab.train.spec import RunSpec
from qklab.train.trainer import make_probe, split_windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    specs = {}
    for record in read_records(options.folder):
        corpus, arm, _ = record["place"].split("/")
        spec = RunSpec.from_dict(record["run"]["spec"])
        specs[corpus, arm, spec.seed] = spec
    with (options.folder / "initial.jsonl").open("w") as file:
        for (corpus, arm, seed), spec in specs.items():
            probe = make_probe(spec, split_windows(spec, prepare_corpus(spec.corpus, data=options.data)))
            layers = probe.measure(Decoder(spec.model, seed=spec.seed))
            line = {"corpus": corpus, "arm": arm, "seed": seed} | average_heads({"step": 0, "layers": layers})
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{len(specs)} models probed, in {options.folder / 'initial.jsonl'}")


if __name__ == "__main__":
    main()
