"""Benchmarks: every row compares us with a neighbour, round by round, in one run. `python -m benchmarks --help`

    __main__      options, table, JSON
    rows          what is measured, and the bars
    stage         a fresh home and the contestants of one row
    contestants   processes that do one round when told; rounds interleaved
    drive         what runs in such a process
    ours          rounds through `@distributed`
    neighbours    the same through fork, torchrun, torchrunx, accelerate, pickle
    ranks         what runs in ranks, whoever starts them
    environments  the rows about environments: environment_ours, environment_neighbours, on environment_sets
    tracking_rows the row about tracking: `tracked`, in an interpreter that has MLflow
    ray_rows      the row about Ray: `ray_clusters`, in an interpreter that has Ray, with `ray_driver`
    decisions     the row about how long the scheduler takes to decide
    load          the rows about load on a server: `load-runs` and so on
    ranges        what the medians were five times, and whether they still are
    report        numbers, table, machine

docs/benchmarks.md says what each row means.
"""
