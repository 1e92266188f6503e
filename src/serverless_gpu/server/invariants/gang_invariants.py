"""I3, of gangs: what the crews of an attempt are, what they amount to, and which of them may have run user code.

crews      as many as nodes, each on its own; numbers and ranks go on from one to the next; devices add up
ended      an attempt has ended when all of its crews have; no crew of a newer one is there before, nor where a
           process of an older one may be left
met        user code of several crews begins once it is chosen how they meet; of a gang that was called off, never
released   all ranks had returned then; from there on it ends otherwise only by a crew whose results did not come
reason     that a peer failed is nobody's own
"""

from __future__ import annotations

from collections.abc import Iterator

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.server.invariants.invariant_inputs import Booked, Violation, violation_of
from serverless_gpu.server.records.runs.attempts import StoredAttempt
from serverless_gpu.server.records.runs.crews import StoredCrew


def gangs(booked: Booked) -> Iterator[Violation]:
    """Yield what is wrong with the crews of a run."""
    for attempt in booked.attempts:
        for sentence in (*_laid_out(attempt), *_amounting(attempt), *_met(attempt, booked), *_released(attempt)):
            yield violation_of(booked, "I3", f"attempt {attempt.fence} {sentence}")
    for attempt in booked.attempts:
        left = [crew for crew in attempt.crews if not crew.proven]
        if left and attempt.fence < booked.run.fence:
            sentence = f"attempt {attempt.fence} may have left a process on {left[0].node}, and another one was made"
            yield violation_of(booked, "I3", sentence)
    if booked.run.reason is Reason.PEER_FAILED:
        yield violation_of(booked, "I3", "ended because of a peer, which is nobody's own reason")


def _laid_out(attempt: StoredAttempt) -> Iterator[str]:
    crews = attempt.crews
    if len(crews) != attempt.num_nodes or sum(crew.gpus for crew in crews) != attempt.world_size:
        devices = sum(crew.gpus for crew in crews)
        yield f"has {len(crews)} crews of {attempt.num_nodes}, and {devices} devices of {attempt.world_size}"
    if len({crew.node_id for crew in crews}) != len(crews):
        yield "has two crews on one node"
    firsts = [sum(other.gpus for other in crews[:number]) for number in range(len(crews))]
    if [(crew.number, crew.first_rank) for crew in crews] != list(enumerate(firsts)):
        found = ", ".join(f"{crew.number} from rank {crew.first_rank} on" for crew in crews)
        yield f"has crews that do not follow one another: {found}"
    if (attempt.num_nodes > 1) != bool(attempt.nonce):
        yield f"is on {attempt.num_nodes} nodes, and its nonce is {'not there' if not attempt.nonce else 'there'}"


def _amounting(attempt: StoredAttempt) -> Iterator[str]:
    still_open = len(attempt.open_crews)
    if attempt.ended_ns is not None and still_open:
        yield f"has {still_open} open crews, and is over"
    if attempt.ended_ns is None and not still_open:
        yield "has no open crew, and is not over"
    states = ", ".join(crew.state for crew in attempt.crews)
    is_silent = any(crew.state is State.UNREACHABLE for crew in attempt.open_crews)
    if is_silent != (attempt.state is State.UNREACHABLE) or attempt.began != any(crew.began for crew in attempt.crews):
        yield f"is {attempt.state}, began {attempt.began}: crews {states}"
    if attempt.reason is Reason.PEER_FAILED:
        yield "ended because of a peer, and none of its crews says why"
    cause = attempt.cause
    if cause is not None and cause.crew is not None and not 0 <= cause.crew < len(attempt.crews):
        yield f"ends because of crew {cause.crew}, which it does not have"
    if cause is not None and cause.reason is Reason.PEER_FAILED:
        yield "ends because of a peer, and none of its crews says why"


def _met(attempt: StoredAttempt, booked: Booked) -> Iterator[str]:
    if attempt.called_off and (attempt.chosen_json is not None or attempt.began):
        yield "was called off, and its crews have met"
    chosen = attempt.chosen
    if chosen is not None and not len(chosen.addresses) == len(chosen.interfaces) == attempt.num_nodes:
        yield f"is on {attempt.num_nodes} nodes, and {len(chosen.addresses)} addresses were chosen"
    # A server that was restored may not know that it was chosen.
    is_known = booked.run.restored_ns is None
    if attempt.num_nodes > 1 and attempt.began and chosen is None and not attempt.called_off and is_known:
        yield "has begun, and its crews have not met"


def _released(attempt: StoredAttempt) -> Iterator[str]:
    if not attempt.released:
        return
    early = [crew for crew in attempt.crews if not crew.returned and not _succeeded(crew)]
    if early or attempt.called_off:
        names = ", ".join(crew.node for crew in early)
        yield f"was released, and not all ranks had returned: {names or 'it was called off'}"
    cause = attempt.cause
    if cause is not None and (cause.crew is None or not _failed_after_all(attempt, cause.crew)):
        yield f"was released, and ended before its end all the same ({cause.reason})"


def _failed_after_all(attempt: StoredAttempt, number: int) -> bool:
    """Return whether a crew has ended, and not by success: its results did not come, or its node was lost."""
    crew = attempt.crews[number] if number < len(attempt.crews) else None
    return crew is not None and crew.ended_ns is not None and not _succeeded(crew)


def _succeeded(crew: StoredCrew) -> bool:
    return crew.reason is not None and MEANINGS[crew.reason].state is State.SUCCEEDED
