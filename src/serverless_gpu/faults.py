"""Named fault points at which a test can kill a process, as a power cut or `kill -9` would.

    SGPU_FAULT=after_commit_before_launch sgpu up …    kills every process that reaches the fault point
    SGPU_FAULT=@/path/to/file sgpu up …                kills the first process that reaches the point in the file and
                                                       removes the file: a test arms a point while processes run

The server and the node call `reach("name")` at each fault point. Without `SGPU_FAULT`, `reach` does nothing. The tuple
`PLACES` lists every fault point. `reach` rejects unknown names, so a test cannot wait for a removed fault point.
`tests/e2e/crash` has a scenario for every fault point. A server with `SGPU_FAULT` logs a warning at its start.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "SGPU_FAULT"
PLACES = (
    # Fault points during server startup.
    "in_migration",  # The migration has created tables but has not committed them.
    "before_file_is_named",  # The key or token file exists only under its temporary name.
    "after_token_file_before_row",  # The new token is in the token file but not yet in the database.
    # Fault points in the server's database.
    "before_commit",  # A transaction has executed its statements but has not committed.
    "after_commit_before_told",  # The database has committed a transaction but has not answered the waiting callers.
    # On a full disk, the server has deleted its reserve file but has not recreated the file.
    "after_reserve_is_given_back",
    "in_audit_chain",  # New audit log rows have a position in the hash chain but are not committed.
    # Fault points in the life of a run, from submission to end.
    "after_submit_before_answer",  # The server has stored the run but has not answered the client.
    # The server has stored the attempt and its order but has not sent the order to any node.
    "after_commit_before_launch",
    "after_order_left",  # The server has sent an order to a node but has received no answer.
    # The server has stored a node's acknowledgement of an order but has not answered the node.
    "after_ack_before_answer",
    # The server has stored the output of an attempt's report, but not the reported state.
    "after_logs_before_state",
    "in_ledger_batch",  # The server has not committed the transaction with an attempt's new ledger facts.
    "after_upload_before_state",  # The server has stored the run's results and logs, but not the run's new state.
    "after_report_before_answer",  # The server has stored an attempt's report but has not answered the sender.
    "after_stop_before_answer",  # The server has stored the stop request but has not answered the caller.
    "after_hello_before_answer",  # The server has stored the node's registration but has not answered the node.
    # Fault points of multi-node gangs.
    # The server has a node's rendezvous offer in memory but has not sent the offer to any node.
    "after_offer_before_answer",
    "after_choose_before_commit",  # The server has chosen the rendezvous but has not stored the choice.
    # The server has stored the choice of the rendezvous but has not sent the choice to any node.
    "after_chosen_before_answer",
    # The server has stored the cancellation of the rendezvous but has not sent the cancellation to any node.
    "after_called_off_before_told",
    # The server has stored the decision that all ranks may exit or must end. Only the reporting node may know the
    # decision.
    "after_decided_before_told",
    # Fault points in the storage of objects and run output.
    "before_object_is_named",  # The file of a new object exists only under its temporary name.
    "after_part_before_answer",  # The server has stored a part of an upload but has not answered the sender.
    "after_parts_are_deleted",  # The garbage collector has deleted some of the unused upload parts.
    "after_rows_before_output",  # The retention job has deleted the run's database rows, but not the run's output.
    # Fault points in the server's ledger.
    "in_charging",  # The server has not committed the transaction with the attempts' new ledger charges.
    # The ledger has charges for some attempts. The next transaction charges more attempts.
    "after_charges_before_more",
    # Fault points during server administration.
    "before_backup_is_named",  # The backup is complete but still has its temporary name.
    "before_restored_is_named",  # The restored server directory is complete but still has its temporary name.
    "between_rotation_steps",  # The rotation has replaced only some of the keys, sealed rows, tokens and files.
    "after_restore_is_settled",  # A restore has recorded the new states of runs but has not removed its marker file.
    # Fault points in a node's uplink. The uplink has created the attempt's directory but has not asked an agent to run
    # the attempt.
    "after_directory_before_launch",
    # The uplink has written the first of an attempt's secrets to a file, but not all secrets.
    "before_secrets_are_complete",
    # The uplink has written the attempt's secrets to files but has not asked an agent to run the attempt.
    "after_secrets_before_launch",
    "after_launch_before_ack",  # The uplink has started the attempt but has not acknowledged the attempt's order.
    # The uplink has the server's first answer but has not sent the confirmation to the supervisor.
    "after_answer_before_confirm",
    # The uplink has an attempt's next token but has not written the token to the attempt's directory.
    "before_token_is_written",
    # The uplink has written the next token to the attempt's directory but has not used the token.
    "after_token_is_written",
    # The uplink has sent all parts of a result, but not the report that names the parts.
    "after_parts_before_report",
    # The uplink has delivered all data of the attempt but has not recorded the delivery in the attempt's directory.
    "after_ending_before_settled",
    # Fault points in a node's supervisor.
    "after_exec_before_told",  # The supervisor has recorded the start of user code but has not reported it.
    "after_ending_before_told",  # The supervisor has recorded the end of user code but has not reported it.
    "after_freed_before_receipt",  # The supervisor has recorded the release of the devices, but not the receipt.
)


def crash(place: str) -> None:
    """Kill this process. Tests that run in one process replace `crash` with a function that raises."""
    os.kill(os.getpid(), signal.SIGKILL)


def reach(place: str) -> None:
    """Kill this process if `SGPU_FAULT` names this fault point."""
    if place not in PLACES:
        raise ValueError(f"unknown fault point {place!r}")
    named = os.environ.get(VARIABLE)
    if named is None:
        return
    if named == place or (named.startswith("@") and _is_mine(named[1:], place)):
        crash(place)


def named() -> str:
    """Return the value of `SGPU_FAULT`, or ""."""
    return os.environ.get(VARIABLE, "")


def warning() -> str:
    """Return the warning that a process with `SGPU_FAULT` logs at its start."""
    return (
        f"{VARIABLE} is set to {named()[:200]!r}: this process kills itself at that fault point. Use the variable "
        "only in recovery tests"
    )


def _is_mine(path: str, place: str) -> bool:
    """Return True if a file names this fault point.

    Remove the file, so that the fault point kills only one process.
    """
    try:
        with open(path, encoding="utf-8") as file:
            if file.read(100).strip() != place:
                return False
        os.unlink(path)
    except OSError:
        return False
    return True
