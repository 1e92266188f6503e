"""Who runs next, where, and why the others wait. Values in, values out: no clock, no database, no network.

    changes: runs come, start, end; nodes come, change, go ─┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and sentence, when asked
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

`values.py` what goes in and comes out · `planner.py` the state and the pass · `telling.py` a wait as a sentence.
"""
