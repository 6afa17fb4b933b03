"""Build the documentation as a site: `make site`, then open build/site/index.html.

The pages are the files as they lie in the repository: README.md and everything its links lead to, gathered in a folder
of the same shape, so that every link means the same on the site as it does in a checkout. mkdocs checks them all.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build/pages"


def linked_files(page: Path) -> set[Path]:
    """Files of the repository that a page links to or shows."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    paths = [(page.parent / target).resolve() for target in targets if target and not re.match(r"[a-z]+:", target)]
    return {path for path in paths if path.is_file() and path.is_relative_to(ROOT)}


def reachable_files(start: Path) -> set[Path]:
    """`start` and every file that one can come to from it."""
    found, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if path.suffix == ".md":
                waiting.extend(linked_files(path))
    return found


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in reachable_files(ROOT / "README.md") | {ROOT / "docs/site.css"}:
        copy = PAGES / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
