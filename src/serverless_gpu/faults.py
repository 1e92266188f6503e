"""Named places where a test can end this process, as a power cut or `kill -9` would.

    SGPU_FAULT=after_commit_before_launch sgpu up …    every process that reaches the place
    SGPU_FAULT=@/path/to/file sgpu up …                the first one that reaches the place the file names, which it
                                                       removes: so a test arms a place while everything runs

Server and node call `reach("name")` where they pass a place. Nothing happens unless the variable names it. Every name
has a row here, and `reach` knows no other, so that a test cannot wait for a place that is gone; `tests/e2e/crash` has a
scenario for every row. A server that is started with the variable says so in its log.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "SGPU_FAULT"
PLACES = (
    # the server starts
    "in_migration",  # the tables are made, and nothing of that is committed
    "before_file_is_named",  # a key or token is on the disk, under a name that no request has
    "after_token_file_before_row",  # the file has the new token, the database does not know it
    # its database
    "before_commit",  # a transaction's work is done, nothing of it is committed
    "after_commit_before_told",  # a transaction is durable, its waiting callers do not know
    "after_reserve_is_given_back",  # the disk is full, what was kept back is given, and not made again
    "in_audit_chain",  # rows of the audit have their place in the chain, nothing of that is committed
    # runs, from being asked for to their end
    "after_submit_before_answer",  # the run is durable, its client does not know
    "after_commit_before_launch",  # the attempt and its order are durable, no node knows
    "after_order_left",  # the order is on its way, the node's word about it has not come
    "after_ack_before_answer",  # that the order was taken is durable, the node does not know
    "after_logs_before_state",  # a report's output is in the files, the rest of it is not in the database
    "in_ledger_batch",  # facts are written inside of a transaction that is not committed
    "after_upload_before_state",  # results and logs are durable, the run's state is not
    "after_report_before_answer",  # the report is durable, its sender does not know
    "after_stop_before_answer",  # the stop is durable, its caller does not know
    "after_hello_before_answer",  # the node is written down, it does not know
    # gangs on several nodes
    "after_offer_before_answer",  # the server has a crew's places in memory only, and has sent them to no node
    "after_choose_before_commit",  # how the crews meet is decided, and not durable
    "after_chosen_before_answer",  # how they meet is durable, none of them knows
    "after_called_off_before_told",  # that they will not meet is durable, none of them knows
    "after_decided_before_told",  # that all may exit, or why all are to end, is durable, the others do not know
    # bytes
    "before_object_is_named",  # a part or object is on the disk, under a name that no request has
    "after_part_before_answer",  # a part is durable, its sender does not know
    "after_parts_are_deleted",  # the collector has deleted parts, and goes on to the next
    "after_rows_before_output",  # retention: the run's rows are gone, its output is not
    # the ledger
    "in_charging",  # entries of attempts are written inside of a transaction that is not committed
    "after_charges_before_more",  # some attempts are charged, others wait for the next transaction
    # its operation
    "before_backup_is_named",  # a backup has everything but its name
    "before_restored_is_named",  # restore: the server has everything but its name
    "between_rotation_steps",  # rotate: some of key, sealed rows, tokens and files are new, the others are not
    "after_restore_is_settled",  # restore: what becomes of runs is durable, the mark that has it decided is there
    # the node: uplink
    "after_directory_before_launch",  # the attempt's directory is there, no agent has been asked to run it
    "before_secrets_are_complete",  # the first of an attempt's secrets is a file, the others are not
    "after_secrets_before_launch",  # its secrets are files, no agent has been asked to run it
    "after_launch_before_ack",  # the attempt runs, the server does not know that the order was taken
    "after_answer_before_confirm",  # the server has answered the first report, the supervisor does not know
    "before_token_is_written",  # the uplink has an attempt's next token, the attempt's directory has the one before
    "after_token_is_written",  # the directory has the next token, too, nothing was said with it
    "after_parts_before_report",  # the parts of a result are on the server, no report names them
    "after_ending_before_settled",  # the server has everything, the attempt's directory does not say so
    # the node: supervisor
    "after_exec_before_told",  # the start of user code is recorded, and not sent
    "after_ending_before_told",  # its ending is recorded, and not sent
    "after_freed_before_receipt",  # that the devices are free is written down, the receipt is not
)


def crash(place: str) -> None:
    """Kill this process; tests in one process put an exception in place of this function."""
    os.kill(os.getpid(), signal.SIGKILL)


def reach(place: str) -> None:
    """Die here if `SGPU_FAULT` names this place."""
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
    """Return the warning that a process with the variable logs at its start."""
    return (
        f"{VARIABLE} is set to {named()[:200]!r}: this process kills itself there; that is for tests of recovery only"
    )


def _is_mine(path: str, place: str) -> bool:
    """Return whether a file names this place; removes it, so that no other process dies of it."""
    try:
        with open(path, encoding="utf-8") as file:
            if file.read(100).strip() != place:
                return False
        os.unlink(path)
    except OSError:  # there is none, or another process was faster
        return False
    return True
