"""Who runs next, where, and why the others wait. Values in, values out: no clock, no database, no network.

    changes: runs come, start, end; nodes come, change, go ─┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and sentence, when asked
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

`values.py` what goes in and comes out · `planner.py` the state and what it is asked · `state.py` what is kept: who
waits in `queue.py` (for what: `shapes.py`), what there is in `floor.py`, who had how much in `fairness.py` ·
`passing.py` one pass: where a gang starts in `placing.py` (on several nodes: `spreading.py`), where it will in
`promising.py`, what is free when in `reserving.py`, who leaves for whom in `preempting.py` · `explaining.py` why others
wait, `impossible.py` what can never be, `telling.py` a wait as a sentence · `learning.py` how long runs take.
"""
