"""Named fault points where a test can kill this process, like a power cut or `kill -9`.

    SGPU_FAULT=after_commit_before_launch sgpu up …    kills every process that reaches the fault point
    SGPU_FAULT=@/path/to/file sgpu up …                kills the first process that reaches the point in the file and
                                                       removes the file: a test arms a point while processes run

The server and the node call `reach("name")` at each fault point. Without `SGPU_FAULT`, `reach` does nothing. Every
name has a row here, and `reach` rejects other names. So a test cannot wait for a fault point that was removed.
`tests/e2e/crash` has a scenario for every row. A server with `SGPU_FAULT` logs a warning at its start.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "SGPU_FAULT"
PLACES = (
    # Start of the server.
    "in_migration",  # The migration has created tables but has not committed them.
    "before_file_is_named",  # A key or token is on the disk, under a temporary name that no request has.
    "after_token_file_before_row",  # The file has the new token, but the database does not have the token.
    # Database of the server.
    "before_commit",  # The work of a transaction is done but not committed.
    "after_commit_before_told",  # A transaction is durable, but the callers that wait for it have no result yet.
    "after_reserve_is_given_back",  # On a full disk, the reserve file is deleted and not created again yet.
    "in_audit_chain",  # New rows of the audit log have their place in the chain but are not committed.
    # Runs, from submission to end.
    "after_submit_before_answer",  # The run is durable, but the client has no answer yet.
    "after_commit_before_launch",  # The attempt and its order are durable, but no node has received the order.
    "after_order_left",  # The server has sent the order, but the node has not answered yet.
    "after_ack_before_answer",  # The acknowledgement of an order is durable, but the node has no answer yet.
    "after_logs_before_state",  # A report's output is in the log files, but its state is not in the database.
    "in_ledger_batch",  # New facts are in a transaction that is not committed.
    "after_upload_before_state",  # Results and logs are durable, but the run's state is not.
    "after_report_before_answer",  # The report is durable, but its sender has no answer yet.
    "after_stop_before_answer",  # The stop request is durable, but its caller has no answer yet.
    "after_hello_before_answer",  # The node's registration is durable, but the node has no answer yet.
    # Gangs on several nodes.
    "after_offer_before_answer",  # The server has a node's rendezvous offer in memory but has sent it to no node.
    "after_choose_before_commit",  # The server has chosen the rendezvous, but the choice is not durable.
    "after_chosen_before_answer",  # The choice of the rendezvous is durable, but no node has received it.
    "after_called_off_before_told",  # The cancellation of the rendezvous is durable, but no node has received it.
    # The decision that all ranks may exit or must end is durable, but the other nodes have not received it.
    "after_decided_before_told",
    # Parts and output.
    "before_object_is_named",  # A part or object is on the disk, under a temporary name that no request has.
    "after_part_before_answer",  # A part is durable, but its sender has no answer yet.
    "after_parts_are_deleted",  # The garbage collector has deleted some of the unused parts.
    "after_rows_before_output",  # Retention has deleted the run's rows, but not its output.
    # Ledger.
    "in_charging",  # New ledger entries of attempts are in a transaction that is not committed.
    "after_charges_before_more",  # Some attempts have charges; other attempts wait for the next transaction.
    # Operation of the server.
    "before_backup_is_named",  # A backup is complete except for its final name.
    "before_restored_is_named",  # A restored server is complete except for its final name.
    "between_rotation_steps",  # A rotation has replaced some of the key, sealed rows, tokens and files.
    "after_restore_is_settled",  # A restore has recorded the new states of runs but has not removed its marker.
    # Uplink of a node.
    "after_directory_before_launch",  # The attempt's directory exists, but the uplink has asked no agent to run it.
    "before_secrets_are_complete",  # The first of an attempt's secrets is in a file, but the other secrets are not.
    "after_secrets_before_launch",  # The attempt's secrets are in files, but the uplink has asked no agent to run it.
    "after_launch_before_ack",  # The attempt runs, but the server has no acknowledgement of the order.
    # The server has answered the first report, but the supervisor has no confirmation yet.
    "after_answer_before_confirm",
    "before_token_is_written",  # The uplink has an attempt's next token, but the directory has the previous one.
    "after_token_is_written",  # The attempt's directory has the next token, but the uplink has not used the token.
    "after_parts_before_report",  # The parts of a result are on the server, but no report names them.
    # The server has all data of the attempt, but the attempt's directory does not record that.
    "after_ending_before_settled",
    # Supervisor of a node.
    "after_exec_before_told",  # The start of user code is recorded but not sent.
    "after_ending_before_told",  # The end of user code is recorded but not sent.
    "after_freed_before_receipt",  # The release of the devices is recorded, but the receipt is not.
)


def crash(place: str) -> None:
    """Kill this process. Tests within one process replace this function with an exception."""
    os.kill(os.getpid(), signal.SIGKILL)


def reach(place: str) -> None:
    """Kill this process if `SGPU_FAULT` names this fault point."""
    if place not in PLACES:
        raise ValueError(f"there is no fault point {place!r}")
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
        f"{VARIABLE} is set to {named()[:200]!r}: this process kills itself at that fault point; use the variable "
        "only for tests of recovery"
    )


def _is_mine(path: str, place: str) -> bool:
    """Return True if a file names this fault point. Remove the file, so that no other process ends there."""
    try:
        with open(path, encoding="utf-8") as file:
            if file.read(100).strip() != place:
                return False
        os.unlink(path)
    except OSError:  # The file does not exist, or another process has removed it.
        return False
    return True
