"""Checks the Python environment: imports, incompatible packages, and files that hide modules.

Several checks use the facts about package imports. A check reports the import failures whose error text matches the
check's pattern. The check `imports` reports all remaining import failures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from serverless_gpu.doctor.facts import (
    Check,
    CheckGroup,
    Finding,
    Imported,
    ImportFacts,
    InterpreterFacts,
    MachineFacts,
    UnknownFact,
    about,
    failed,
    ok,
    unknown,
    warning,
)

_Mend = Callable[[str], str]

_TEXT_MAX = 200
_MORE_TIME = "sgpu doctor --limit 60"
_NUMPY_ABI = re.compile(
    r"numpy\.dtype size changed|compiled using NumPy 1|_ARRAY_API not found|numpy\.core\.multiarray"
)
_TORCHVISION = re.compile(r"torchvision::nms|Couldn't load custom C\+\+ ops|torchvision.*undefined symbol")
_CUDA_LIBRARY = re.compile(r"lib(cudnn|cublas|cusparse|cudart|nccl|cufft|curand|cusolver|nvrtc|cupti|nvjitlink)\w*\.so")
_LIBSTDCXX = re.compile(r"(GLIBCXX|CXXABI|GLIBC)_[\d.]+'? not found")
_KNOWN = (_NUMPY_ABI, _TORCHVISION, _CUDA_LIBRARY, _LIBSTDCXX)
_TROUBLE = ("raised", "crashed", "hung")
TORCH_FAMILY = frozenset({"torch", "torchvision", "torchaudio", "numpy", "triton"})


def _interpreter(facts: MachineFacts) -> list[Finding]:
    found = facts.interpreter
    if isinstance(found, UnknownFact):
        return unknown(f"{facts.python}: {found.why}")
    kind = "virtual environment" if found.prefix != found.base_prefix else "no virtual environment"
    sentence = f"Python {found.version}, {found.executable}, {kind}"
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = facts.environ.get(name)
        if active and active.rstrip("/") not in (found.prefix, found.base_prefix):
            python = shlex.quote(f"{active}/bin/python")
            mend = f"{python} -m serverless_gpu.cli doctor   (first install serverless-gpu there if it is missing)"
            return warning(f"{sentence}; but the active environment is {active} ({name})", mend)
    if "PYTHONHOME" in facts.environ:
        return warning(f"{sentence}; PYTHONHOME={facts.environ['PYTHONHOME']}", "unset PYTHONHOME")
    return ok(sentence)


@about(lambda facts: facts.imports)
def _imports(facts: MachineFacts, imports: ImportFacts) -> list[Finding]:
    found: list[Finding] = []
    for name, imported in imports.modules.items():
        if imported.outcome == "hung":
            trace = f"{facts.python_command} -X importtime -c 'import {name}'   (or: {_MORE_TIME})"
            found += unknown(f"import {name} did not finish: {imported.error}", trace)
        elif imported.outcome in _TROUBLE and not any(pattern.search(_text(imported)) for pattern in _KNOWN):
            last = imported.written.strip().rpartition("\n")[2] if imported.outcome == "crashed" else ""
            wrote = f"; it wrote: {_short(last)}" if last else ""
            mend = f"{facts.python_command} -m pip install --force-reinstall {_package(name)}"
            found += failed(f"import {name}: {_short(imported.error)}{wrote}", mend)
    untried = {name: imported.error for name, imported in imports.modules.items() if imported.outcome == "untried"}
    if untried:
        found += unknown(f"not tried: {', '.join(untried)} ({next(iter(untried.values()))})", _MORE_TIME)
    versions = facts.interpreter.packages if isinstance(facts.interpreter, InterpreterFacts) else {}
    there = [name for name, imported in imports.modules.items() if imported.outcome == "ok"]
    named = ", ".join(f"{name} {versions.get(_package(name), '')}".strip() for name in there)
    return found or ok(named or "none of the usual packages is installed")


@about(lambda facts: facts.interpreter)
def _requirements(facts: MachineFacts, found: InterpreterFacts) -> list[Finding]:
    if found.broken_problem:
        return unknown(found.broken_problem, f"{facts.python_command} -m pip check")
    findings = []
    for broken in found.broken:
        has = f"{broken.found} is installed" if broken.found else "the requirement is not installed"
        sentence = f"{broken.package} {broken.version} requires {broken.requirement}, and {has}"
        findings += warning(sentence, f"{facts.python_command} -m pip install '{broken.requirement}'")
    return findings or ok("torch and its related packages have all requirements")


@about(lambda facts: facts.interpreter)
def _shadowed(facts: MachineFacts, found: InterpreterFacts) -> list[Finding]:
    if not facts.cwd:
        return warning("the client refuses calls, because the working directory no longer exists", "cd")
    findings = []
    for shadow in found.shadows:
        whose = f"the standard library's {shadow.name}" if shadow.is_stdlib else shadow.other
        mend = f"rename {shadow.file}"
        sentence = f"{shadow.file} hides {whose}"
        findings += failed(sentence, mend) if shadow.name in TORCH_FAMILY else warning(sentence, mend)
    return findings or ok(f"no file in {facts.cwd} has the name of an installed module")


@about(lambda facts: facts.imports)
def _openmp(facts: MachineFacts, imports: ImportFacts) -> list[Finding]:
    intel = [path for path in imports.openmp if re.search(r"libi?omp\d*[-.]", path.rpartition("/")[2])]
    gnu = [path for path in imports.openmp if path not in intel]
    if len(intel) > 1 or (intel and gnu):
        return warning(f"one process loads several OpenMP runtimes: {', '.join(imports.openmp)}")
    if not imports.openmp:
        return ok("no package loaded an OpenMP runtime")
    copies = f", {len(gnu)} copies of GNU's (harmless)" if len(gnu) > 1 else ""
    return ok(f"{imports.openmp[0].rpartition('/')[2]}{copies}")


def _pythonpath(facts: MachineFacts) -> list[Finding]:
    value = facts.environ.get("PYTHONPATH", "")
    if not value:
        return ok("not set")
    version = facts.interpreter.version if isinstance(facts.interpreter, InterpreterFacts) else ""
    findings = []
    for entry in value.split(":"):
        other = re.search(r"python(\d\.\d+)", entry)
        if other and version and not version.startswith(other[1] + "."):
            findings += failed(
                f"PYTHONPATH puts packages of Python {other[1]} before those of Python {version}: {entry}"
            )
        elif "site-packages" in entry or "dist-packages" in entry:
            findings += warning(f"PYTHONPATH puts the packages of another environment first: {entry}")
    return findings or ok(value)


def _hf_transfer(facts: MachineFacts) -> list[Finding]:
    if facts.environ.get("HF_HUB_ENABLE_HF_TRANSFER", "").upper() not in ("1", "ON", "YES", "TRUE"):
        return []
    if isinstance(facts.interpreter, UnknownFact):
        return unknown(facts.interpreter.why)
    packages = facts.interpreter.packages
    hub = packages.get("huggingface-hub", "")
    if not hub:
        return []
    if not hub.startswith("0."):
        return ok(f"huggingface_hub {hub} ignores HF_HUB_ENABLE_HF_TRANSFER")
    if "hf-transfer" in packages:
        return ok("hf_transfer is installed")
    mend = f"{facts.python_command} -m pip install hf_transfer   (or: export HF_HUB_ENABLE_HF_TRANSFER=0)"
    return failed("HF_HUB_ENABLE_HF_TRANSFER=1, but the package hf_transfer is not installed", mend)


def _matching(facts: MachineFacts, pattern: re.Pattern[str], fine: str, mend: _Mend, only: str = "") -> list[Finding]:
    """Return a failure for each failed import whose error text matches a pattern.

    Return a warning for a successful import whose output matches the pattern.
    """
    imports = facts.imports
    if isinstance(imports, UnknownFact):
        return unknown(imports.why)
    found: list[Finding] = []
    for name, imported in imports.modules.items():
        match = pattern.search(_text(imported))
        if match is None:
            continue
        if imported.outcome in _TROUBLE:
            found += failed(f"import {name}: {_short(imported.error)}", mend(name))
        else:
            line = next((line for line in imported.written.splitlines() if match[0] in line), match[0])
            found += warning(f"import {name} complains: {_short(line)}", mend(name))
    if found or not fine:
        return found
    asked = [imports.modules[only]] if only in imports.modules else list(imports.modules.values())
    if all(imported.outcome == "absent" for imported in asked):
        return []
    if not any(imported.outcome == "ok" for imported in asked):
        return unknown(f"Python could not import {only or 'the usual packages'}")
    return ok(fine)


def _mend_numpy(facts: MachineFacts, name: str) -> str:
    text = _text(facts.imports.modules[name]) if isinstance(facts.imports, ImportFacts) else ""
    older = (
        f"   (or, if there is no newer version: {facts.python_command} -m pip install 'numpy<2')"
        if "NumPy 1" in text
        else ""
    )
    return f"{facts.python_command} -m pip install --upgrade --force-reinstall numpy {_package(name)}{older}"


def _package(name: str) -> str:
    return {"sklearn": "scikit-learn", "cv2": "opencv-python"}.get(name, name)


def _text(imported: Imported) -> str:
    return f"{imported.error}\n{imported.written}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_MAX else line[: _TEXT_MAX - 1] + "…"


CHECKS = (
    Check(
        code="interpreter",
        group=CheckGroup.ENVIRONMENT,
        title="The interpreter",
        symptoms=(
            "ModuleNotFoundError: No module named 'serverless_gpu'",
            "ModuleNotFoundError: No module named 'torch'",
        ),
        cause="Ranks use the caller's interpreter. A terminal, a notebook kernel and `sgpu` may use different "
        "interpreters.",
        mend="install into the caller's environment, with the Python of that environment: python -m pip install …",
        probe=_interpreter,
    ),
    Check(
        code="imports",
        group=CheckGroup.ENVIRONMENT,
        title="Importing the usual packages",
        symptoms=("ImportError: … undefined symbol: …", "a rank dies of SIGSEGV or SIGILL during an import"),
        cause="A package is broken, incompletely upgraded, or built for another processor or another version of torch.",
        mend="python -m pip install --force-reinstall <package>",
        probe=_imports,
    ),
    Check(
        code="numpy-abi",
        group=CheckGroup.ENVIRONMENT,
        title="NumPy and packages compiled against it",
        symptoms=(
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. "
            "Expected 96 from C header, got 88 from PyObject",
            "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.… as it may crash.",
        ),
        cause="The installation of a package changed NumPy's version, but other packages require the old version.",
        mend="python -m pip install --upgrade --force-reinstall numpy <package>",
        probe=lambda facts: _matching(
            facts,
            _NUMPY_ABI,
            "the compiled packages match NumPy",
            lambda name: _mend_numpy(facts, name),
        ),
    ),
    Check(
        code="torchvision",
        group=CheckGroup.ENVIRONMENT,
        title="torchvision and torch versions",
        symptoms=("RuntimeError: operator torchvision::nms does not exist",),
        cause="Only torch was upgraded, or torch and torchvision come from different indexes (CPU and CUDA).",
        mend="python -m pip install --upgrade --force-reinstall torch torchvision   (both from the same index)",
        probe=lambda facts: _matching(
            facts,
            _TORCHVISION,
            "torchvision matches torch",
            lambda _: (
                f"{facts.python_command} -m pip install --upgrade --force-reinstall torch torchvision   (both "
                "from the same index)"
            ),
            only="torchvision",
        ),
    ),
    Check(
        code="cuda-libraries",
        group=CheckGroup.ENVIRONMENT,
        title="CUDA libraries of torch",
        symptoms=("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",),
        cause="torch loads cuDNN, NCCL and other libraries from its own directory. Another package's "
        "installation has replaced or removed these libraries.",
        mend="python -m pip install --force-reinstall torch",
        probe=lambda facts: _matching(
            facts,
            _CUDA_LIBRARY,
            "torch finds its libraries",
            lambda _: f"{facts.python_command} -m pip install --force-reinstall torch",
            only="torch",
        ),
    ),
    Check(
        code="libstdcxx",
        group=CheckGroup.ENVIRONMENT,
        title="A C++ runtime that is too old",
        symptoms=("ImportError: …/libstdc++.so.6: version `GLIBCXX_3.4.29' not found",),
        cause="LD_LIBRARY_PATH or an old distribution provides an older C++ runtime than the package needs.",
        mend="unset LD_LIBRARY_PATH; with conda: conda install -c conda-forge libstdcxx-ng",
        probe=lambda facts: _matching(
            facts,
            _LIBSTDCXX,
            "",
            lambda name: (
                f"{facts.python_command} -m pip install --force-reinstall {_package(name)}"
                "   (or unset LD_LIBRARY_PATH; with conda: conda install -c conda-forge libstdcxx-ng)"
            ),
        ),
    ),
    Check(
        code="requirements",
        group=CheckGroup.ENVIRONMENT,
        title="Requirements of torch and related packages",
        symptoms=("pip: … requires torch==…, but you have torch … which is incompatible",),
        cause="pip installs a requested package even if the installation breaks another package.",
        mend="run `python -m pip check` and install the packages that it names",
        probe=_requirements,
    ),
    Check(
        code="shadowed-modules",
        group=CheckGroup.ENVIRONMENT,
        title="A file that hides a module",
        symptoms=(
            "AttributeError: partially initialized module 'torch' has no attribute … "
            "(most likely due to a circular import)",
            "ImportError: cannot import name … from 'utils' (…/utils.py)",
        ),
        cause="Python first searches the program's directory and PYTHONPATH. A file in the program's directory "
        "hides an installed module of the same name.",
        mend="rename the file that hides the module, and delete its __pycache__",
        probe=_shadowed,
    ),
    Check(
        code="openmp",
        group=CheckGroup.ENVIRONMENT,
        title="Two OpenMP runtimes",
        symptoms=(
            "OMP: Error #15: Initializing libiomp5.so, but found libiomp5.so already initialized.",
            "a rank hangs or crashes in its first matrix product",
        ),
        cause="Packages from different sources (pip, conda, MKL) each load their own OpenMP runtime into one process.",
        mend="install torch, numpy and scikit-learn from one source; with conda: conda install nomkl",
        probe=_openmp,
    ),
    Check(
        code="pythonpath",
        group=CheckGroup.ENVIRONMENT,
        title="PYTHONPATH",
        symptoms=(
            "a package has another version than `pip show` reports",
            "SyntaxError in a package for another version of Python",
        ),
        cause="The directories in PYTHONPATH precede the environment's own packages, in ranks and in the caller.",
        mend="unset PYTHONPATH",
        probe=_pythonpath,
    ),
    Check(
        code="hf-transfer",
        group=CheckGroup.ENVIRONMENT,
        title="Downloads from the Hugging Face Hub",
        symptoms=(
            "ValueError: Fast download using 'hf_transfer' is enabled (HF_HUB_ENABLE_HF_TRANSFER=1) but 'hf_transfer' "
            "package is not available in your environment.",
        ),
        cause="HF_HUB_ENABLE_HF_TRANSFER=1 requires the package hf_transfer, which is not installed.",
        mend="python -m pip install hf_transfer   (or: export HF_HUB_ENABLE_HF_TRANSFER=0)",
        probe=_hf_transfer,
    ),
)
