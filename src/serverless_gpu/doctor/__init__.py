"""Finds problems with a machine and its Python environment, and suggests a remedy for each problem.

    probes/ ──Facts──▶ checks: one table, each row judges facts ──Findings──▶ examination.py: text, JSON
                       └────────────────────────────────────────▶ docs/troubleshooting.md (the same table)

Probes gather facts about each area in parallel, with a time limit per area. Probes that may hang or crash (NVML,
package imports) run in separate processes. Checks are pure functions of the gathered facts, so that tests can simulate
any situation. The doctor changes no files, starts no agent and executes no user code. A check that lacks facts reports
"unknown", never "ok".
"""
