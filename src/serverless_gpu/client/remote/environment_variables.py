"""Selects the caller's variables for ranks on another machine.

Most mean the same everywhere: credentials, switches of libraries, the user's own. Those that name a place, a process or
a device of the caller's machine do not travel; the node has its own. The token never travels.
"""

from __future__ import annotations

from collections.abc import Mapping

from serverless_gpu.node.inside.process_group import SWITCH

TOKEN = "SERVERLESS_GPU_TOKEN"

_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "EDITOR",
        "HOME",
        "HOST",
        "HOSTNAME",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LOGNAME",
        "MAIL",
        "NVIDIA_VISIBLE_DEVICES",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "TEMP",
        "TERM_SESSION_ID",
        "TMP",
        "TMPDIR",
        "TMUX",
        "USER",
        "VIRTUAL_ENV",
        "WAYLAND_DISPLAY",
        "WINDOWID",
        "XAUTHORITY",
        "_",
    }
)
_PREFIXES = (
    "CONDA_",
    "DBUS_",
    "DYLD_",
    "JPY_",
    "LD_",
    "MASTER_",
    "SLURM_",
    "SSH_",
    "SYSTEMD_",
    "VSCODE_",
    "XDG_",
    "SERVERLESS_GPU_",
    "SGPU_",
)


def elsewhere(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mean the same on another machine."""
    return {
        name: value
        for name, value in environ.items()
        if name == SWITCH or (name not in _NAMES and not name.startswith(_PREFIXES))
    }


def here(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks on the caller's own machine: all but the token."""
    return {name: value for name, value in environ.items() if name != TOKEN}
