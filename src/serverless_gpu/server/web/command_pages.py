"""Maps each command to the page that shows or does the same, or to the reason why no page does.

A test compares these entries with the commands of `sgpu`.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandPage(NamedTuple):
    """A command with the path of its page below `/ui`, or with a reason."""

    command: str
    path: str = ""
    reason: str = ""


MONEY: tuple[CommandPage, ...] = (
    CommandPage("usage", "/usage"),
    CommandPage("budget list", "/budgets"),
    CommandPage("budget show", "/budgets/{name}"),
    CommandPage("budget set", "/budgets"),
    CommandPage("budget reopen", "/budgets/{name}"),
    CommandPage("budget delete", "/budgets/{name}"),
    CommandPage("policy list", "/policies"),
    CommandPage("policy mine", "/policies?mine=true"),
    CommandPage("policy show", "/policies/{name}"),
    CommandPage("policy set", "/policies"),
    CommandPage("policy attach", "/policies/{name}"),
    CommandPage("policy detach", "/policies/{name}"),
    CommandPage("policy delete", "/policies/{name}"),
    CommandPage("price list", "/prices"),
    CommandPage("price set", "/prices"),
    CommandPage("price end", "/prices"),
)
SECRETS: tuple[CommandPage, ...] = (
    CommandPage("secret list", "/secrets"),
    CommandPage("secret set", "/secrets"),
    CommandPage("secret delete", "/secrets"),
)
ENVIRONMENTS: tuple[CommandPage, ...] = (
    CommandPage("env show", "/environments/{address}"),
    CommandPage("env diff", "/environments/diff"),
    CommandPage("env fingerprint", reason="reads the interpreter of the caller's machine, which a browser cannot do"),
    CommandPage("env capture", reason="reads the files of the caller's machine, which a browser cannot do"),
    CommandPage("env restore", reason="writes files on the caller's machine, which a browser cannot do"),
    CommandPage("env gc", reason="deletes objects of a store that the command names; the server collects by itself"),
)
AUDIT: tuple[CommandPage, ...] = (
    CommandPage("audit list", "/audit"),
    CommandPage("audit export", "/audit"),
    CommandPage("audit verify", "/audit/verification"),
)
SERVER: tuple[CommandPage, ...] = (
    CommandPage("server config", "/server"),
    CommandPage("server drain", "/server"),
    CommandPage("server resume", "/server"),
    CommandPage(
        "server backup", reason="copies the server's files to a disk of its machine; the page has the last one"
    ),
    CommandPage("server verify", reason="reads a backup on the operator's machine; the page has the last result"),
    CommandPage("server restore", reason="makes the files of a server that does not run yet"),
    CommandPage("server rotate", reason="replaces keys and tokens while the server is stopped"),
    CommandPage("server check", reason="also checks a server that is stopped; the page has the self-check's result"),
    CommandPage("server unit", reason="prints a file for systemd on the operator's machine"),
    CommandPage("server logs", reason="reads the log in the server's home, also while the server is stopped"),
    CommandPage("up", reason="starts the server that serves the pages"),
    CommandPage("down", reason="stops the server, after which no page could show the result"),
)
COMMAND_PAGES: tuple[CommandPage, ...] = (*MONEY, *SECRETS, *ENVIRONMENTS, *AUDIT, *SERVER)
"""Entries of all groups. Add each further group to this list."""
