"""The scheduler: selects the runs that start next and the devices for each run.

    changes: runs arrive, start, end; nodes join, leave ────┐
    policy: shares, half-life, reservations, guard ─────────┼─▶ Planner.decide(now) ─▶ placements, preemptions
    now ────────────────────────────────────────────────────┘   Planner.why(run)     ─▶ reason and message, on request
                                                                 Planner.estimate(wanted) ─▶ expected start, its basis

    values.py                  inputs and outputs
    planner.py                 the planner, and one pass over the queue
    planner_state.py           the queue, and other state between passes
    capacity.py                nodes, and the runs on them
    fairness.py                past use of teams and users
    gang_placement.py          devices for a gang that starts now
    backfill.py                devices for a gang that starts later
    availability_timeline.py   free devices over time
    preemption.py              runs that leave for another run
    cleared_devices.py         devices that preempted runs release for another run
    wait_explanation.py        reasons why runs wait
    wait_messages.py           wait reasons as text
    feasibility.py             requests that no node can ever serve
    duration_estimates.py      expected durations of runs
    concurrency_limits.py      limits from policies and budgets

The modules of this package use no clock, database or network.
"""
