"""A probe program, run by `python -P -c`, that imports packages one by one and reports each outcome.

    begin <name> · end <name> <outcome> <error> <what it wrote>      a "begin" without an "end" is a crash or a hang

The program itself uses only `os` and `sys`. A module that the program had already loaded could not fail the import
test.
"""

import os
import sys

_WRITTEN_BYTES = 4_000


def main() -> None:
    """Import the modules named on the command line, then report torch's devices and OpenMP runtimes."""
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    for name in sys.argv[2:]:
        _tell(fd, "begin", name)
        start = os.fstat(2).st_size
        outcome, error = _import(name)
        _tell(fd, "end", name, outcome, error, _written_since(start))
    _tell(fd, "openmp", _openmp())
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        _tell_torch(fd, torch)
    os._exit(0)


def _import(name: str) -> tuple[str, str]:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return "absent", ""
        return "raised", f"ModuleNotFoundError: {error}"
    except BaseException as error:  # noqa: BLE001 - packages may raise any exception, including SystemExit
        return "raised", f"{type(error).__name__}: {error}"
    return "ok", ""


def _tell_torch(fd: int, torch: object) -> None:
    """Report torch's build first and its devices second, because the device query may hang."""
    version = getattr(torch, "version", None)
    said = {
        "version": str(getattr(torch, "__version__", "")),
        "cuda": str(getattr(version, "cuda", None) or ""),
        "hip": str(getattr(version, "hip", None) or ""),
    }
    _tell(fd, "torch", said)
    if not (said["cuda"] or said["hip"]):
        return
    _tell(fd, "begin", "torch.cuda")
    start = os.fstat(2).st_size
    cuda = getattr(torch, "cuda", None)
    seen: dict[str, object] = {}
    try:
        if cuda is not None:
            seen["devices"] = int(cuda.device_count()) if cuda.is_available() else 0
            seen["architectures"] = [str(name) for name in cuda.get_arch_list()]
    except BaseException as error:  # noqa: BLE001 - with a broken driver, torch may raise any exception
        seen["problem"] = f"{type(error).__name__}: {error}"
    written = _written_since(start).strip()
    if written and "problem" not in seen:
        seen["problem"] = written[-400:]
    _tell(fd, "torch", {**said, **seen})


def _openmp() -> list[str]:
    paths = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            name = path.rpartition("/")[2]
            if name.startswith(("libgomp", "libiomp", "libomp")):
                paths.add("/" + path)
    return sorted(paths)


def _written_since(start: int) -> str:
    """Return the end of the output that the process has written to the stderr file since offset `start`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    end = os.fstat(2).st_size
    return os.pread(2, _WRITTEN_BYTES, max(start, end - _WRITTEN_BYTES)).decode("utf-8", "replace")


def _tell(fd: int, *record: object) -> None:
    data = (ascii(record) + "\n").encode("ascii")
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
