"""What every engine has to do, as tests: for ours, and for whoever writes another.

    class TestMine(EngineConformance):
        @pytest.fixture
        def engine(self): return MyEngine(...)
        @pytest.fixture
        def shares(self): return (Share(node="n1", gpu_type="CPU", count=1),)    # fits while the engine is empty
        @pytest.fixture
        def restarted(self): return lambda: MyEngine(...)                        # on what the first one left behind

The engine of each test is fresh and has nothing reserved. An engine that counts devices overrides `full`, too: shares
that fit alone and leave no room for themselves again. Nothing here sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from serverless_gpu.engines.base import Engine, Gang, Impossible, NodeLost, NodeUp, Placed, Share, Waiting

Shares = tuple[Share, ...]


class EngineConformance:
    """Tests that take fixtures `engine`, `shares`, `restarted`, and `full` where the engine counts."""

    @pytest.fixture
    def full(self) -> Shares | None:
        """Return shares that fill a node, or None where the engine does not count."""
        return None

    def test_every_node_is_said_to_be_up_before_anything_else(self, engine: Engine) -> None:
        """Events and nodes agree, and events come once."""
        events = engine.events()
        assert [event.node for event in events if isinstance(event, NodeUp)] == list(engine.nodes())
        assert not any(isinstance(event, NodeLost) for event in events)
        assert engine.events() == []

    def test_names_of_nodes_are_unique(self, engine: Engine) -> None:
        """A name means one node."""
        names = [node.name for node in engine.nodes()]
        assert len(set(names)) == len(names)

    def test_a_plan_says_what_it_would_do_and_does_nothing(self, engine: Engine, shares: Shares) -> None:
        """The same gang is planned the same way, the text names it, and nothing is reserved."""
        gang = Gang(id="run:1", shares=shares)
        request = engine.plan(gang)
        assert request == engine.plan(gang)
        assert request.gang == gang
        assert all(word in request.text for word in ("run:1", *(share.node for share in shares)))
        assert engine.recover() == []

    def test_a_gang_that_fits_is_placed_and_again_it_is_the_same_one(self, engine: Engine, shares: Shares) -> None:
        """Submitting twice changes nothing: the identifier is the gang."""
        gang = Gang(id="run:1", shares=shares)
        assert engine.submit(engine.plan(gang)) == Placed(gang=gang)
        assert engine.submit(engine.plan(gang)) == Placed(gang=gang)
        assert engine.recover() == ["run:1"]

    def test_a_node_that_does_not_exist_is_impossible_and_reserves_nothing(
        self, engine: Engine, shares: Shares
    ) -> None:
        """All or nothing, and the sentence names the node."""
        nowhere = Share(node="no-such-node", gpu_type=shares[0].gpu_type, count=1)
        answer = engine.submit(engine.plan(Gang(id="run:1", shares=(*shares, nowhere))))
        assert isinstance(answer, Impossible)
        assert "no-such-node" in answer.sentence
        assert engine.recover() == []
        assert isinstance(engine.submit(engine.plan(Gang(id="run:2", shares=shares))), Placed)

    def test_what_is_full_waits_and_is_free_after_a_release(self, engine: Engine, full: Shares | None) -> None:
        """A gang that finds no room waits, with a sentence, and reserves nothing."""
        if full is None:
            pytest.skip("this engine does not count devices; the scheduler does")
        assert isinstance(engine.submit(engine.plan(Gang(id="run:1", shares=full))), Placed)
        answer = engine.submit(engine.plan(Gang(id="run:2", shares=full)))
        assert isinstance(answer, Waiting)
        assert answer.sentence
        assert engine.recover() == (["run:1", "run:2"] if engine.queues else ["run:1"])
        engine.release("run:1")
        assert isinstance(engine.submit(engine.plan(Gang(id="run:2", shares=full))), Placed)

    def test_a_release_may_come_twice_and_for_what_was_never_there(self, engine: Engine, shares: Shares) -> None:
        """Releasing is idempotent."""
        engine.submit(engine.plan(Gang(id="run:1", shares=shares)))
        for gang in ("run:1", "run:1", "never:1"):
            engine.release(gang)
        assert engine.recover() == []

    def test_another_attempt_of_a_run_is_another_gang(self, engine: Engine, shares: Shares) -> None:
        """Giving back an old attempt does not touch the new one."""
        engine.submit(engine.plan(Gang(id="run:1", shares=shares)))
        engine.release("run:1")
        engine.submit(engine.plan(Gang(id="run:2", shares=shares)))
        engine.release("run:1")
        assert engine.recover() == ["run:2"]

    def test_a_restart_finds_what_was_reserved(
        self, engine: Engine, restarted: Callable[[], Engine], shares: Shares
    ) -> None:
        """The next process recovers every gang, and goes on with it."""
        gang = Gang(id="run:1", shares=shares)
        engine.submit(engine.plan(gang))
        engine.close()
        again = restarted()
        assert again.recover() == ["run:1"]
        assert again.submit(again.plan(gang)) == Placed(gang=gang)
        again.release("run:1")
        assert again.recover() == []
        again.close()

    def test_it_may_be_used_from_several_threads(self, engine: Engine, shares: Shares) -> None:
        """One gang submitted and released by many is placed, or not there, and nothing in between."""
        gang = Gang(id="run:1", shares=shares)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: engine.submit(engine.plan(gang)), range(32)))
            assert answers == [Placed(gang=gang)] * 32
            list(pool.map(engine.release, ["run:1"] * 32))
        assert engine.recover() == []

    def test_closing_twice_is_closing(self, engine: Engine) -> None:
        """Leaving is idempotent, too."""
        engine.close()
        engine.close()
