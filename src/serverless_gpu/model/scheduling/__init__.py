"""The scheduler: who runs next and where. Values in, values out: no clock, no database, no network.

    changes: runs come, start, end; nodes come, change, go ─┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and sentence, when asked
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

`values.py` what goes in and comes out · `planner.py` the planner and one pass over the queue · `planner_state.py` what
it keeps: the queue, `capacity.py` nodes and who has what, `fairness.py` who had how much
· `gang_placement.py` where a gang starts now, `backfill.py` where it will, `availability_timeline.py` what is free
when, `preemption.py` who leaves for whom, `cleared_devices.py` what is kept for it · `wait_explanation.py` why others
wait, `feasibility.py` what can never be, `wait_messages.py` a wait as a sentence · `duration_estimates.py` how long
runs take · `concurrency_limits.py` what policies and budgets let through.
"""
