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
_MACHINE = "concerns the caller's machine, which a browser cannot reach"
RUNS: tuple[CommandPage, ...] = (
    *(CommandPage(name, "/runs") for name in ("runs", "run list")),
    *(CommandPage(name, "/runs/{run}") for name in ("show", "run show", "cancel", "run cancel", "run preempt")),
    *(CommandPage(name, "/runs/{run}/logs") for name in ("logs", "run logs", "attach", "run attach")),
    *(CommandPage(name, "/runs/{run}/metrics") for name in ("metrics", "run metrics")),
    *(CommandPage(name, "/queue") for name in ("queue", "run queue")),
    CommandPage("result", reason="loads a result into Python; the run's page has the file for download"),
    CommandPage("run result", reason="loads a result into Python; the run's page has the file for download"),
    CommandPage("submit", reason="sends files and the environment of the caller's machine; a run's page runs it again"),
    CommandPage("run submit", reason="sends files and the environment of the caller's machine"),
    CommandPage("mlflow", reason="opens MLflow, to which a run's page links"),
    CommandPage("clean", reason=_MACHINE),
    CommandPage("session list", reason=_MACHINE),
    CommandPage("session end", reason=_MACHINE),
)
NODES: tuple[CommandPage, ...] = (
    *(CommandPage(f"node {name}", "/nodes") for name in ("list", "approve")),
    *(
        CommandPage(f"node {name}", "/nodes/{node}")
        for name in (
            *("show", "drain", "resume", "calendar", "quarantine", "release"),
            *("forget", "rotate", "revoke", "canary"),
        )
    ),
    CommandPage("node invite", reason="writes a file with a secret that an administrator carries to the machine"),
    CommandPage("node spawner", reason="is a process of the node's machine"),
    CommandPage("node sweep", reason="runs on the node's machine; the node's page has the findings"),
    CommandPage("node unit", reason="prints a file for systemd on the node's machine"),
    CommandPage("join", reason="starts a node on the caller's machine"),
    CommandPage("gpus", reason="shows the GPUs of the caller's machine; the page of nodes shows those of all nodes"),
    CommandPage("top", reason="shows the caller's machine; the page of a node shows the same of a node"),
    *(CommandPage(name, reason=_MACHINE) for name in ("doctor", "status", "stop")),
    *(CommandPage(f"pool {name}", "/pools") for name in ("list", "set")),
    *(CommandPage(f"pool {name}", "/pools/{name}") for name in ("show", "delete")),
    *(CommandPage(f"share {name}", "/pools") for name in ("list", "set", "delete")),
)
PEOPLE: tuple[CommandPage, ...] = (
    *(CommandPage(f"user {name}", "/people") for name in ("list", "create", "delete", "set", "password")),
    *(CommandPage(f"team {name}", "/people") for name in ("list", "create", "delete", "set", "join", "leave")),
    *(CommandPage(f"token {name}", "/people") for name in ("list", "create", "revoke")),
    CommandPage("whoami", "/people"),
    CommandPage("login", "/device"),
    CommandPage("logout", "/people"),
    CommandPage("web", reason="opens the pages"),
)
INDEXES: tuple[CommandPage, ...] = (
    *(CommandPage(f"index {name}", "/indexes") for name in ("list", "set", "delete", "log")),
    CommandPage("index token", reason="prints a secret for pip or uv on the caller's machine"),
)
OTHERS: tuple[CommandPage, ...] = (
    CommandPage("advise", reason="reads files of usage on the caller's machine; the usage page has the figures"),
    CommandPage("simulate", reason="simulates a cluster on the caller's machine"),
    *(CommandPage(name, reason="describes the command line") for name in ("completion", "help", "schema", "version")),
)
COMMAND_PAGES: tuple[CommandPage, ...] = (
    *(*RUNS, *NODES, *MONEY, *PEOPLE, *SECRETS),
    *(*ENVIRONMENTS, *INDEXES, *AUDIT, *SERVER, *OTHERS),
)
"""Entries of all commands. Add each further command to one of the groups."""
