"""Who runs next, where, and why the others wait. Values in, values out: no clock, no database, no network.

    changes: runs come, start, end; nodes come, change, go ─┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and sentence, when asked
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

`values.py` what goes in and comes out · `planner.py` the state and what it is asked · `state.py` what is kept: `queue.py`
who waits (`shapes.py` for what), `floor.py` what there is, `fairness.py` who had how much · `passing.py` one pass:
`placing.py` where a gang starts, `reserving.py` what is free when, `preempting.py` who leaves for whom · `explaining.py`
why others wait, `impossible.py` what can never be, `telling.py` a wait as a sentence · `learning.py` how long runs take.
"""
