"""Finds problems of this machine and environment, and names the command that fixes each problem.

    probes/ ──Facts──▶ checks: one table, each row judges facts ──Findings──▶ examination.py: text, JSON
                       └────────────────────────────────────────▶ docs/troubleshooting.md (the same table)

The probes gather facts, with a time limit for each area. All probes run in parallel. Probes that may hang or crash
(NVML, package imports) run in separate processes. The checks are pure functions of these facts, so tests can check any
situation. The doctor changes nothing, starts no agent and runs no file of the caller. A check without evidence reports
"unknown", never "ok".
"""
