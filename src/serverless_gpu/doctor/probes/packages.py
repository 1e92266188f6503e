"""A probe program, run by `python -P -c`, that reports installed packages and files that hide modules."""

import sys

_AT_START = frozenset(sys.modules)  # No file can hide modules that Python loads at startup.

import contextlib  # noqa: E402
import os  # noqa: E402
from importlib import metadata  # noqa: E402
from importlib.machinery import PathFinder  # noqa: E402

_NAMES_MAX = 2_000
_HARMLESS = frozenset({"test", "tests", "this", "antigravity", "__main__", "__init__", "setup", "conftest"})
_FAMILY = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "numba",
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "pytorch-lightning",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "xformers",
    "vllm",
)
_KNOWN = (*_FAMILY, "pyarrow", "opencv-python", "datasets", "huggingface-hub", "hf-transfer", "ray", "mlflow")


def main() -> None:
    """Write all facts to the file descriptor given on the command line."""
    broken, problem = _broken()
    said = {
        "executable": sys.executable,
        "version": ".".join(str(number) for number in sys.version_info[:3]),
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "path": list(sys.path),
        "packages": {name: version for name in _KNOWN if (version := _version(name))},
        "shadows": _shadows(),
        "broken": broken,
        "broken_problem": problem,
    }
    data = (ascii(("packages", said)) + "\n").encode("ascii")
    fd = int(sys.argv[1])
    while data:
        data = data[os.write(fd, data) :]


def _version(name: str) -> str:
    try:
        return str(metadata.version(name) or "")
    except metadata.PackageNotFoundError:
        return ""


def _shadows() -> list[dict[str, object]]:
    """Return the files in the working directory and PYTHONPATH that hide a module of the same name."""
    places = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    with contextlib.suppress(OSError):
        places.insert(0, os.getcwd())
    installed = ("site-packages", "dist-packages")
    own = [os.path.realpath(place) for place in places if not any(name in place for name in installed)]
    rest = [entry for entry in sys.path if entry and os.path.realpath(entry) not in own]
    found: list[dict[str, object]] = []
    for place in dict.fromkeys(own):
        for name, file in _modules_in(place):
            if name in sys.stdlib_module_names:
                if name not in _AT_START and name not in sys.builtin_module_names:
                    found.append({"name": name, "file": file, "other": name, "is_stdlib": True})
                continue
            try:
                spec = PathFinder.find_spec(name, rest)
            except (ImportError, ValueError, OSError):
                continue
            if spec is not None and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(file):
                found.append({"name": name, "file": file, "other": spec.origin})
    return found


def _modules_in(place: str) -> list[tuple[str, str]]:
    """Return the name and file of each top-level module in a directory."""
    try:
        names = sorted(os.listdir(place))[:_NAMES_MAX]
    except OSError:
        return []
    found = []
    for entry in names:
        path = os.path.join(place, entry)
        package = os.path.join(path, "__init__.py")
        if entry.endswith(".py") and entry[:-3] not in _HARMLESS:
            found.append((entry[:-3], path))
        elif entry not in _HARMLESS and os.path.isfile(package):
            found.append((entry, package))
    return found


def _broken() -> tuple[list[dict[str, str]], str]:
    """Return the unmet requirements of torch and related packages, or the error of the comparison."""
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            requirements = __import__(module, fromlist=["Requirement"])
            break
        except ImportError:
            continue
    else:
        return [], "package requirements cannot be compared because neither packaging nor pip is installed"
    found = []
    for name in _FAMILY:
        version = _version(name)
        for text in (metadata.requires(name) or []) if version else []:
            try:
                requirement = requirements.Requirement(text)
                if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                    continue
                there = _version(requirement.name)
                if there and requirement.specifier.contains(there, prereleases=True):
                    continue
            except (ValueError, KeyError):  # A separate check reports an invalid requirement or version.
                continue
            wanted = f"{requirement.name}{requirement.specifier}"
            found.append({"package": name, "version": version, "requirement": wanted, "found": there})
    return found, ""


if __name__ == "__main__":
    main()
