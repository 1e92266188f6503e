"""A node and its server: orders become runs, and the server hears everything of them once it can."""

from __future__ import annotations

from serverless_gpu.model.attempt import Reason, State
from tests.uplink.node import Node


def hello(text: str) -> str:
    """Say something in a rank."""
    print(text, flush=True)
    return text


def test_an_order_becomes_a_run_whose_output_results_facts_and_receipt_reach_the_server(node: Node) -> None:
    attempt = node.run(hello, "from the node", ranks=2).settled()
    assert attempt.reason is Reason.COMPLETED and attempt.ending is not None and attempt.ending.began
    assert attempt.ending.state is State.SUCCEEDED
    assert attempt.logs["0.stdout"] == attempt.logs["1.stdout"] == b"from the node\n"
    assert set(attempt.files) == {"results/0.pkl", "results/1.pkl"}
    assert attempt.facts[0] == "reserved" and "freed" in attempt.facts.values()
    assert attempt.receipt is not None and attempt.receipt["gate"].startswith("2 GPUs verified free")
