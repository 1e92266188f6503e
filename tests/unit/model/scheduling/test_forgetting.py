"""What the scheduler remembers of those who are gone: nothing, once it makes no difference."""

from __future__ import annotations

from serverless_gpu.model.scheduling.fairness import Fairness
from serverless_gpu.model.scheduling.values import QueuedRun, QueuePolicy, Used

DAY_NS = 86_400 * 1_000_000_000


def test_an_account_whose_use_has_decayed_to_nothing_is_forgotten_and_one_in_use_is_not() -> None:
    accounts = Fairness(QueuePolicy(half_life_s=86_400.0))
    used = {f"t{number}": 1000.0 for number in range(50)}
    accounts.tell(Used(at_ns=0, teams=used, users={(team, "u"): use for team, use in used.items()}))
    accounts.begin("r", QueuedRun(run_id="r", title="u/r", owner="u", team="t7", queued_ns=0), 0.0, 0)
    accounts.settle(DAY_NS)
    assert set(accounts.usage(DAY_NS)) == set(used)
    assert accounts.usage(40 * DAY_NS).keys() == {"t7"}
    accounts.end("r")
    assert accounts.usage(80 * DAY_NS) == {}
