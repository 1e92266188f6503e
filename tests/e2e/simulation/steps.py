"""What can be done to a world: each step that a plan may have, by its name."""

from __future__ import annotations

import random
from collections.abc import Callable

from serverless_gpu.engines.base import Impossible, Waiting
from serverless_gpu.errors import NotFound
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.server.nodes.node_service import NodeCommand
from serverless_gpu.wire.nodes import NodeDrainRequest
from tests.e2e.simulation.client import Client
from tests.e2e.simulation.network import Link
from tests.e2e.simulation.node import MOMENTS, OF_GANGS, Node
from tests.e2e.simulation.plan import PLACES, Step
from tests.e2e.simulation.spending import MONEY_STEPS, PROJECTS
from tests.e2e.simulation.storage import Killed
from tests.e2e.simulation.world import OF_THE_ENGINE, ROOT, World


def _node(world: World, step: Step) -> Node:
    return world.nodes[step.which % len(world.nodes)]


def _submit(world: World, step: Step) -> None:
    rng = random.Random(f"client {world.plan.seed} {step.which}")
    tag = _tag(world, step)
    world.clients.append(Client(world.time, world.network, world.new_run_id(), rng, tag=tag))


def _submit_long(world: World, step: Step) -> None:
    run_id, rng = world.new_run_id(), random.Random(f"client {world.plan.seed} {step.which}")
    world.long.add(run_id)
    tag = _tag(world, step)
    world.clients.append(Client(world.time, world.network, run_id, rng, size="long", tag=tag))


def _submit_large(world: World, step: Step) -> None:
    rng = random.Random(f"large {world.plan.seed} {step.which}")
    tag = _tag(world, step)
    world.clients.append(Client(world.time, world.network, world.new_run_id(), rng, size="large", tag=tag))


def _tag(world: World, step: Step) -> str:
    """Return which project a run is for, where that matters."""
    return ("", *PROJECTS)[step.which % 3] if world.plan.spends else ""


def _stop(why: StopReason) -> Callable[[World, Step], None]:
    def stop(world: World, step: Step) -> None:
        if world.clients:
            world.clients[step.which % len(world.clients)].stop(why)

    return stop


def _regrace(world: World, step: Step) -> None:
    """An operator restarts the server with another `--partition-grace`."""
    world.grace_s = (8.0, 12.0, 40.0)[step.which % 3]
    world.kill_server(step.amount * 5)


def _kill_in_a_write(world: World, step: Step) -> None:
    hows = ("before", "after", "after", "unheard")
    world.disk.dies = (step.which % 7, hows[step.which % 4])  # type: ignore[assignment] # one of these words
    world.lasting(10.0, lambda: setattr(world.disk, "dies", None))
    world.lasting(3.0 + step.amount * 10, world.start_server)


def _kill_at_a_place(world: World, step: Step) -> None:
    world.place = PLACES[step.which % len(PLACES)]


def _cut_node(world: World, step: Step) -> None:
    link = _node(world, step).link
    link.up, link.down = step.which % 3 == 0, step.which % 3 == 1
    world.lasting(step.amount * 70, lambda: _join(link))


def _cut_client(world: World, step: Step) -> None:
    if world.clients:
        link = world.clients[step.which % len(world.clients)].link
        link.up = link.down = False
        world.lasting(step.amount * 60, lambda: _join(link))


def _join(link: Link) -> None:
    link.up = link.down = True


def _kill_uplink(world: World, step: Step) -> None:
    node = _node(world, step)
    node.kill_uplink()
    world.time.after(step.amount**2 * 60, node.start_uplink)


def _reboot(world: World, step: Step) -> None:
    node = _node(world, step)
    node.reboot()
    world.time.after(step.amount**2 * 60, node.start_uplink)


def _burn(world: World, step: Step) -> None:
    """A machine is gone for ever, and an operator says so, as soon as the server answers; the largest one stays."""
    node = world.nodes[1 + step.which % 2]
    if not node.destroyed:
        _destroy(world, node, step.amount * 30)


def _burn_at_the_end(world: World, step: Step) -> None:
    """A machine is gone for ever after it has told an end, and before the receipt of that."""

    def burn(node: Node, _run_id: str) -> bool:
        if node is world.nodes[0]:
            return False
        world.time.after(0.0, lambda: None if node.destroyed else _destroy(world, node, step.amount * 30))
        return True

    world.traps[MOMENTS[2]] = burn


def _destroy(world: World, node: Node, told_after_s: float) -> None:
    node.destroy()

    def forget() -> None:
        if world.process is None:
            return
        try:
            world.process.serve(lambda services: services.nodes.forget(ROOT, node.name, known_dead=True))
        except (Exception, Killed):  # noqa: BLE001 - the operator asks again, whatever it was
            world.time.after(5.0, forget)

    world.time.after(told_after_s, forget)


def _set_clock(world: World, step: Step) -> None:
    world.clock.ahead_s += (86_400.0, -3_600.0, 3_600.0, -10.0, 600.0)[step.which % 5]


def _set_node_clock(world: World, step: Step) -> None:
    _node(world, step).machine.clock.ahead_s += (3_600.0, -3_600.0, 600.0, -86_400.0)[step.which % 4]


def _slow(world: World, step: Step) -> None:
    world.disk.slow_s = (0.1, 1.0, 5.0)[step.which % 3]
    world.lasting(5 + step.amount * 20, lambda: setattr(world.disk, "slow_s", 0.0))


def _full(world: World, step: Step) -> None:
    world.disk.full = True
    world.fill_disk()

    def room() -> None:
        world.disk.full = False
        world.fill_disk()

    world.lasting(2 + step.amount * 30, room)


def _away(world: World, step: Step) -> None:
    world.disk.away = True
    world.lasting(1 + step.amount * 25, lambda: setattr(world.disk, "away", False))


def _bad_network(world: World, step: Step) -> None:
    network = world.network
    network.lost, network.doubled = (0.0, 0.3, 0.6)[step.which % 3], (0.0, 0.5)[step.which % 2]
    network.late_s = (0.0, 1.0, 12.0)[step.which // 3 % 3]

    def good() -> None:
        network.lost = network.doubled = network.late_s = 0.0

    world.lasting(5 + step.amount * 30, good)


def _dying_line(world: World, step: Step) -> None:
    """Everything of one machine comes later and later, and then nothing does."""
    link = _node(world, step).link
    link.late_s = 12.0

    def die() -> None:
        link.late_s, link.up, link.down = 0.0, False, False
        world.lasting(15 + step.amount * 60, lambda: _join(link))

    world.lasting(8 + step.amount * 20, die)


def _cut_at(moment: str) -> Callable[[World, Step], None]:
    """Cut off whichever node is the next one at a moment, for longer than most graces."""

    def arm(world: World, step: Step) -> None:
        def cut(node: Node, _run_id: str) -> bool:
            node.link.up = node.link.down = False
            world.lasting(40 + step.amount * 30, lambda: _join(node.link))
            return True

        world.traps[moment] = cut

    return arm


def _cut_worker(world: World, step: Step) -> None:
    link = _working(world, step).link
    link.up = link.down = False
    world.lasting(50 + step.amount * 20, lambda: _join(link))


def _late_answers(world: World, step: Step) -> None:
    """What a node that works says is heard at once, what it is told comes late; after the first answers, nothing."""
    link = _working(world, step).link
    link.answers_late_s = 12.0 + step.amount * 5

    def die() -> None:
        link.answers_late_s, link.up, link.down = 0.0, False, False
        world.lasting(70, lambda: _join(link))

    world.lasting(link.answers_late_s + 3.9, die)


def _working(world: World, step: Step) -> Node:
    """Return a node that has user code at work, or any."""
    busy = [node for node in world.nodes if any(one.lives and one.begun for one in node.supervisors.values())]
    return busy[step.which % len(busy)] if busy else _node(world, step)


def _cut_apart(world: World, step: Step) -> None:
    """Two machines do not reach each other; the server reaches both."""
    one, other = (world.nodes[number % 3] for number in (step.which, step.which + 1 + step.which % 2))
    one.machine.unreached.add(other.name)
    world.lasting(20 + step.amount * 60, lambda: one.machine.unreached.discard(other.name))


def _when_a_crew(do: Callable[[World, Step, Node, str], None]) -> Callable[[World, Step], None]:
    """Do something just when the next crew has come to some point; some of those that come to it are let pass."""

    def arm(world: World, step: Step) -> None:
        left = [step.which // 7 % 3]

        def spring(node: Node, run_id: str) -> bool:
            left[0] -= 1
            if left[0] < 0:
                world.time.after(0.0, lambda: None if world.mended else do(world, step, node, run_id))
            return left[0] < 0

        world.traps[OF_GANGS[step.which % len(OF_GANGS)]] = spring

    return arm


def _cut_crew(world: World, step: Step, node: Node, _run_id: str) -> None:
    node.link.up, node.link.down = step.which % 3 == 0, step.which % 3 == 1
    world.lasting(step.amount * 70, lambda: _join(node.link))


def _kill_crew(_world: World, _step: Step, node: Node, run_id: str) -> None:
    for (other, _), supervisor in node.supervisors.items():
        if other == run_id and supervisor.lives:
            supervisor.kill()
            supervisor.news()


def _reboot_crew(world: World, step: Step, node: Node, _run_id: str) -> None:
    if not node.destroyed:
        node.reboot()
        world.time.after(step.amount**2 * 60, node.start_uplink)


def _stop_gang(why: StopReason) -> Callable[[World, Step, Node, str], None]:
    def stop(world: World, _step: Step, _node: Node, run_id: str) -> None:
        for client in world.clients:
            if client.run_id == run_id:
                client.stop(why)

    return stop


def _lose(world: World, step: Step) -> None:
    name = OF_THE_ENGINE[step.which % 2]
    world.engine.lose(name, "lost power")
    world.lasting(step.amount * 30, lambda: world.engine.bring_back(name))


def _refuse(world: World, step: Step) -> None:
    sentence = "the engine says so"
    world.engine.answers.append(Impossible(sentence=sentence) if step.which % 2 else Waiting(sentence=sentence))


def _drain_node(world: World, step: Step) -> None:
    """An operator drains a machine, half of the time with what runs there, and takes that back after a while."""
    name, stop = _node(world, step).name, step.which % 2 == 0

    def say(on: bool) -> None:
        if world.process is None:
            return
        asked = NodeCommand(who=ROOT, reach="all", node=name)
        try:
            world.process.serve(
                lambda services: services.node_rules.drain(asked, NodeDrainRequest(on=on, stop=on and stop))
            )
        except NotFound:  # it was given up, or has not joined yet
            return
        except (Exception, Killed):  # noqa: BLE001 - the operator asks again, whatever it was
            world.time.after(5.0, lambda: say(on))
            return
        if on:
            world.time.after(2 + step.amount * 40, lambda: say(False))

    say(True)


DO: dict[str, Callable[[World, Step], None]] = {
    "submit": _submit,
    "submit a long run": _submit_long,
    "submit a large run": _submit_large,
    "cancel": _stop(StopReason.CANCEL),
    "preempt": _stop(StopReason.PREEMPT),
    "drain": _stop(StopReason.DRAIN),
    "kill server": lambda world, step: world.kill_server(step.amount**2 * 60),
    "start server with another grace": _regrace,
    "kill server in a write": _kill_in_a_write,
    "kill server at a place": _kill_at_a_place,
    "cut a node off": _cut_node,
    "cut a client off": _cut_client,
    "kill an uplink": _kill_uplink,
    "kill a supervisor": lambda world, step: _node(world, step).kill_supervisor(step.which),
    "reboot a node": _reboot,
    "burn a node": _burn,
    "set the server's clock": _set_clock,
    "set a node's clock": _set_node_clock,
    "slow disk": _slow,
    "full disk": _full,
    "database away": _away,
    "bad network": _bad_network,
    "a line that dies": _dying_line,
    "cut off who has taken an order": _cut_at(MOMENTS[0]),
    "cut off who may begin": _cut_at(MOMENTS[1]),
    "cut off who works": _cut_worker,
    "answers come late, then none": _late_answers,
    "burn who has told an end": _burn_at_the_end,
    "drain a node": _drain_node,
    "engine loses a node": _lose,
    "engine refuses": _refuse,
    "cut two nodes off each other": _cut_apart,
    "cut off a crew that": _when_a_crew(_cut_crew),
    "kill the supervisor of a crew that": _when_a_crew(_kill_crew),
    "reboot the node of a crew that": _when_a_crew(_reboot_crew),
    "kill the server when a crew": _when_a_crew(
        lambda world, step, _node, _run_id: world.kill_server(step.amount**2 * 30)
    ),
    "cancel when a crew": _when_a_crew(_stop_gang(StopReason.CANCEL)),
    "preempt when a crew": _when_a_crew(_stop_gang(StopReason.PREEMPT)),
    **MONEY_STEPS,
}
