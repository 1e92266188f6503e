"""The scheduler: who runs next and where. Values in, values out: no clock, no database, no network.

    changes: runs come, start, end; nodes come, change, go ─┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and sentence, when asked
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

`values.py` what goes in and comes out · `planner.py` the state and what it is asked · `planner_state.py` what is kept:
who waits in `queue.py` (for what: `request_shapes.py`), what there is in `capacity.py`, who had how much in
`fairness.py` · `scheduling_pass.py` one pass: where a gang starts in `gang_placement.py` (on several nodes:
`multi_node_placement.py`), where it will in `backfill.py`, what is free when in `availability_timeline.py`, who leaves
for whom in `preemption.py` · `wait_explanation.py` why others wait, `impossible_requests.py` what can never be,
`wait_messages.py` a wait as a sentence · `duration_estimates.py` how long runs take.
"""
