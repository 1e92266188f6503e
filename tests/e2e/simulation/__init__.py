"""A server, its nodes, their supervisors, clients and a network in one thread, on virtual time, from one number.

    python -m tests.e2e.simulation --seeds 2000        seeds 0, 1, 2 …; a failure prints how to repeat it
    python -m tests.e2e.simulation --seed 17 --trace   one seed, and everything that happened

What runs is the server's own code (loops, verbs, database layer's SQL); what is played is in this package:

    timeline.py   events in the order of virtual time, clocks that can be wrong
    storage.py    SQLite in memory, that is slow, full, away or dies around a transaction when the plan says so
    server.py     the server's process: parts, loops, requests; killed and started
    network.py    requests and answers, that are late, lost, doubled, out of order, or cut one way
    node.py       a machine: its disk, its uplink, its supervisors; each dies by itself
    crew.py       what supervisors of one gang have to do with each other
    client.py     somebody who submits, waits, cancels and reads, and believes nothing that was not said
    plan.py       a seed → what is done to all of them, and when
    steps.py      what each step of a plan does
    world.py      all of it put together, and what must be true of it
    planted.py    bugs that are put in on purpose: each has to be found
"""
