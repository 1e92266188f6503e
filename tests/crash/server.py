"""The server as a process of its own, with settings no option reaches: `python -m tests.crash.server HOME WORD…`.

WORD   option=value            as on the command line of `sgpu up`
       Settings.field=value    a field of `Settings`, a number
       module.CONSTANT=value   a number of a module of the server, such as `claim.TTL_S`
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from serverless_gpu.ambient import machine
from serverless_gpu.client.remote.profile import Profile, write_profile
from serverless_gpu.loading import load
from serverless_gpu.server.serving import Running, serve
from serverless_gpu.server.settings import Settings, read_settings


def main(home: Path, words: list[str]) -> None:
    """Serve until a signal."""
    said = dict(word.split("=", 1) for word in words)
    options: dict[str, object] = {name: value for name, value in said.items() if "." not in name}
    options |= {"node": said.get("node") != "no", "port": int(said["port"])}
    settings = read_settings(home, options)
    for name, value in said.items():
        module, _, constant = name.rpartition(".")
        if module == Settings.__name__:
            settings = msgspec.structs.replace(settings, **{constant: float(value)})
        elif module:
            there = load(f"serverless_gpu.server.{module}")
            assert isinstance(getattr(there, constant), int | float), f"{name} is no number of the server's"
            setattr(there, constant, float(value))

    def ready(url: str, _running: Running) -> None:
        token = (settings.directory / "token").read_text(encoding="ascii").strip()
        write_profile(home, Profile(url=url, token=token, embedded=True, machine=machine()))
        print(f"ready {url}", flush=True)

    serve(settings, ready=ready)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
