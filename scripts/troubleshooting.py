"""Writes docs/troubleshooting.md from the doctor's table (`make docs`).

Run it as `python -m scripts.troubleshooting`. The page and `sgpu doctor` agree because they use the same rows. A test
fails if the file differs from the output of this program.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from scripts.lints.voice import WIDTH_MAX
from serverless_gpu.doctor.examination import TABLE
from serverless_gpu.doctor.facts import Check, CheckGroup

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"

_HEAD = """\
# Troubleshooting

<!-- Written by `make docs` from src/serverless_gpu/doctor: change the table there, not this page. -->

`sgpu doctor` checks for most of these problems and prints the command that fixes each one. A section names its check.
The last part lists problems that only a run can show. `sgpu show` shows how the latest run ended, and
`sgpu logs --rank all` shows the output of its ranks.
"""

_GROUPS = {
    CheckGroup.MACHINE: "The machine",
    CheckGroup.AGENT: "The agent",
    CheckGroup.SERVER: "The server",
    CheckGroup.GPUS: "GPUs",
    CheckGroup.ENVIRONMENT: "The Python environment",
    CheckGroup.TRACKING: "Tracking",
    CheckGroup.RUNS: "Runs",
}


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD, "\n".join(_index()) + "\n"]
    for group, checks in groupby(TABLE, lambda check: check.group):
        parts.append(f"## {_GROUPS[group]}\n")
        parts += [_section(check) for check in checks]
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")


def _index() -> Iterator[str]:
    for check in TABLE:
        if check.symptoms:
            yield f"- [{check.title}](#{check.code})"
            yield from (_wrapped(f"  - {_code(symptom)}", "    ") for symptom in check.symptoms)


def _section(check: Check) -> str:
    # Explicit anchors keep links valid: titles may change, codes do not.
    lines = [f'<a id="{check.code}"></a>', f"### {check.title}", ""]
    lines += ["```text", *(_wrapped(symptom, "    ") for symptom in check.symptoms), "```", ""]
    lines += [_wrapped(check.cause), "", "Fix:", "", "```text", _wrapped(check.mend, "    "), "```", ""]
    if check.probe is not None:
        lines += [f"The check `{check.code}` of `sgpu doctor` finds this problem.", ""]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    """Return text in lines that fit a page; `indent` begins each continued line."""
    lines = (
        textwrap.wrap(line, WIDTH_MAX, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join("\n".join(each) for each in lines)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    main()
