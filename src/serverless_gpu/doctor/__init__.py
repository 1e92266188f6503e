"""The doctor: finds what is wrong with this machine or environment, and names the command that mends it.

    probes/ ──Facts──▶ checks: one table, each row judges facts ──Findings──▶ examination.py: text, JSON
                       └────────────────────────────────────────▶ docs/troubleshooting.md (the same table)

Gathering is thin and bounded: each area has a time limit and runs beside the others, and what may hang or crash (NVML,
importing packages) runs in processes of its own. Judging is pure: tests give it facts. Nothing is changed, no agent is
started, none of the caller's own files is run. Evidence that cannot be had is "unknown", never a pass.
"""
