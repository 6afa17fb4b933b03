"""What lets Transformers load our folders where nobody imported qklab.hf: a file beside config.json that does.

With trust_remote_code=True Transformers reads it first, and says "pip install qklab" where the package is missing.
"""

import os
from pathlib import Path

from qklab.runs.files import write_text

MODULE = "loading_qklab"
CODE = '''"""Loads this model with trust_remote_code=True; the model itself is in the package qklab."""

from {module} import {name}
'''


def name_loader(config: type) -> dict[str, dict[str, str]]:
    """What config.json says of the file."""
    return {"auto_map": {"AutoConfig": f"{MODULE}.{config.__name__}"}}


def write_loader(folder: str | os.PathLike[str], config: type) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = CODE.format(module=config.__module__, name=config.__name__)
    write_text(Path(folder) / f"{MODULE}.py", text)
