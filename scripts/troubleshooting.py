"""Write docs/troubleshooting.md from the doctor's table: `python -m scripts.troubleshooting` (`make docs`).

The page and `sgpu doctor` say the same because they come from the same rows. A test fails while the file is not what
this writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from serverless_gpu.doctor.examination import TABLE
from serverless_gpu.doctor.facts import Check, CheckGroup

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"

_HEAD = """\
# Troubleshooting

<!-- Written by `make docs` from src/serverless_gpu/doctor: change the table there, not this page. -->

`sgpu doctor` looks for most of this by itself and prints the command that mends it; each section says under which name.
What only a run can show is in the last part. `sgpu show` tells how the latest run ended, `sgpu logs --rank all` what
its ranks wrote.
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
    """Return the whole page."""
    parts = [_HEAD, "| what you see | look at |\n|---|---|\n" + "".join(_index())]
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
        for symptom in check.symptoms:
            yield f"| {_code(symptom).replace('|', chr(92) + '|')} | [{check.title}](#{check.code}) |\n"


def _section(check: Check) -> str:
    # An anchor of its own: titles may change, codes do not.
    lines = [f'<a id="{check.code}"></a>', f"### {check.title}", ""]
    lines += ["```text", *check.symptoms, "```", ""]
    lines += [check.cause, "", "What mends it:", "", "```text", check.mend, "```", ""]
    if check.probe is not None:
        lines += [f"`sgpu doctor` looks at it as `{check.code}`.", ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    main()
