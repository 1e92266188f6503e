"""Chaos: clients, a server, two nodes, and something killed or stopped every few seconds.

python -m tests.e2e.chaos --seed 7 --seconds 600 --database sqlite

plan.py      what clients ask for and what is killed when: pure, from one seed
work.py      what ranks do: they leave a sign of life every few milliseconds
caller.py    a client: a process that calls, cancels, preempts, and writes down what it was told
cluster.py   `sgpu up`, a second node, and ways to kill each of their processes
evidence.py  what clients, ranks, API and ledger say afterwards
verdict.py   what of that must not be: pure
"""
