"""Every piece of code in README and docs runs as a reader would run it, and prints what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.pages import DirectiveError, Script, pages, scripts
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

TEXTS = {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in pages()}
SCRIPTS = [script for page, text in TEXTS.items() for script in scripts(page, text)]
RAY_PYTHON = str(Path(sys.prefix) / "ray" / "bin" / "python")
LIMIT_S = 100

# What torchrun sets; port 0 is a free one of the kernel's choice.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
ALONE["MASTER_PORT"] = "0"

# A notebook without a browser: each cell is run, and the first that fails ends it.
NOTEBOOK = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells!r}:
    if not shell.run_cell(cell, store_history=True).success:
        sys.exit(1)
"""


def _cases() -> list[object]:
    return [pytest.param(s, id=f"{s.page}:{s.line}", marks=_marks(s)) for s in SCRIPTS if not s.skip]


def _marks(script: Script) -> list[pytest.MarkDecorator]:
    if script.heavy or script.ray:
        return [pytest.mark.heavy]
    trains = script.page.startswith("docs/how-to/") and "import torch" in script.text
    return [pytest.mark.long] if trains else []  # caller and ranks load torch, for seconds each


@pytest.mark.parametrize("script", _cases())
def test_the_code_of_the_pages_runs(
    script: Script, reader: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if script.server:
        reader = request.getfixturevalue("server")
    for other in SCRIPTS:
        if other.page == script.page and other.name:
            (tmp_path / other.name).write_text(other.text, encoding="utf-8")
    path = tmp_path / (script.name or "snippet.py")
    path.write_text(NOTEBOOK.format(cells=script.blocks) if script.notebook else script.text, encoding="utf-8")
    environ = {**reader, **(ALONE if script.alone else {})}
    if script.fake:
        environ["SERVERLESS_GPU_FAKE"] = script.fake
    done = subprocess.run(
        [RAY_PYTHON if script.ray else sys.executable, path.name],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if script.raises:
        assert done.returncode != 0, done.stdout
        assert re.search(rf"^(\w+\.)*{script.raises}\b", done.stderr, re.MULTILINE), done.stderr
    else:
        assert done.returncode == 0, done.stderr + done.stdout
    missed = _missed(script.expected(), done.stdout.splitlines())
    assert not missed, f"not printed: {missed}\nprinted:\n{done.stdout}"


def _missed(expected: list[str], printed: list[str]) -> list[str]:
    """Return what was to be printed and was not; ranks write before the caller's own lines, or between them."""
    lines = [re.sub(r"^\[rank \d+\] ", "", line) for line in printed]
    return [pattern for pattern in expected if not any(re.fullmatch(pattern, line) for line in lines)]


def test_every_page_with_code_is_looked_at() -> None:
    assert {"README.md", "docs/quickstart.md"} <= {script.page for script in SCRIPTS}


PAGE = """
<!-- test: named a.py, fake H100:2 -->
```python
print(1)  # 1
```
text
<!-- test: continues -->

```python
print("[x]", y)  # [x] ...
```
```console
$ sgpu status   # comment
output
```
<!-- test: skip because it needs pyspark -->
```python
import pyspark
```
```ipython
1 + 1
```
"""


def test_blocks_become_scripts() -> None:
    first, second, third = scripts("p.md", PAGE)
    assert (first.line, first.name, first.fake) == (3, "a.py", "H100:2")
    assert first.text == golden("docs.snippets.print-print")
    assert _missed(first.expected(), ["1", "[rank 3] [x] 5"]) == []
    assert _missed(first.expected(), ["11"]) == ["1", r"\[x\]\ .*"]
    assert second.skip == "it needs pyspark"
    assert third.notebook and third.blocks == ("1 + 1\n",)


@pytest.mark.parametrize("directive", ["skip", "skip because ", "slow", "fake", "heavy now", "continues"])
def test_a_comment_that_cannot_be_read_is_refused(directive: str) -> None:
    with pytest.raises(DirectiveError):
        scripts("p.md", f"<!-- test: {directive} -->\n```python\npass\n```\n")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- test: heavy -->\n```console\n$ ls\n```\n",
        "<!-- test: heavy -->\ntext\n```python\npass\n```\n",
        "- item\n  ```python\n  pass\n  ```\n",
    ],
)
def test_what_would_silently_not_be_run_is_refused(text: str) -> None:
    with pytest.raises(DirectiveError):
        scripts("p.md", text)
