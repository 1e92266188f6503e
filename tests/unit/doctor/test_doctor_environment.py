"""The doctor's checks of the Python environment: which import failure belongs to which row, and what hides what."""

from __future__ import annotations

import shlex

import pytest
from msgspec.structs import replace

from serverless_gpu.doctor.facts import Broken, CheckOutcome, Imported, ImportFacts, MachineFacts, Shadow
from tests.support.doctor.diagnosed import FAILED, FINE, IMPORTS, INTERPRETER, OK, PYTHON, UNKNOWN, WARNING, found, one
from tests.support.golden import golden


@pytest.mark.parametrize(
    ("environ", "outcome", "ending"),
    [
        ({}, OK, "virtual environment"),
        ({"VIRTUAL_ENV": "/env"}, OK, "virtual environment"),
        ({"CONDA_PREFIX": "/usr"}, OK, "virtual environment"),
        ({"VIRTUAL_ENV": "/other"}, WARNING, "but the active environment is /other (VIRTUAL_ENV)"),
        ({"PYTHONHOME": "/x"}, WARNING, "PYTHONHOME=/x"),
    ],
)
def test_the_interpreter(environ: dict[str, str], outcome: CheckOutcome, ending: str) -> None:
    got, sentence, _ = one("interpreter", MachineFacts(environ=environ, interpreter=INTERPRETER))
    assert got is outcome
    assert sentence.startswith(f"Python 3.11.7, {PYTHON}, ") and sentence.endswith(ending)


NUMPY_ABI = (
    "ValueError: numpy.dtype size changed, may indicate binary incompatibility. "
    "Expected 96 from C header, got 88 from PyObject"
)
NMS = "RuntimeError: operator torchvision::nms does not exist"
CUDNN = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
GLIBCXX = "ImportError: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by x.so)"
NUMPY_1 = "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.2 as it may crash.\n"
PIP = f"{PYTHON} -m pip install"


@pytest.mark.parametrize(
    ("module", "error", "code", "mend"),
    [
        ("pandas", NUMPY_ABI, "numpy-abi", f"{PIP} --upgrade --force-reinstall numpy pandas"),
        (
            "torchvision",
            NMS,
            "torchvision",
            f"{PIP} --upgrade --force-reinstall torch torchvision   (both from the same index)",
        ),
        ("torch", CUDNN, "cuda-libraries", f"{PIP} --force-reinstall torch"),
        (
            "sklearn",
            GLIBCXX,
            "libstdcxx",
            f"{PIP} --force-reinstall scikit-learn   "
            "(or unset LD_LIBRARY_PATH; with conda: conda install -c conda-forge libstdcxx-ng)",
        ),
        ("numba", "ImportError: undefined symbol: x", "imports", f"{PIP} --force-reinstall numba"),
    ],
)
def test_an_import_that_fails_belongs_to_one_check(module: str, error: str, code: str, mend: str) -> None:
    imports = ImportFacts(modules={"torch": FINE, module: Imported(outcome="raised", error=error)})
    facts = MachineFacts(imports=imports, interpreter=INTERPRETER)
    assert one(code, facts) == (FAILED, f"import {module}: {error}", mend)
    others = {"numpy-abi", "torchvision", "cuda-libraries", "libstdcxx", "imports"} - {code}
    assert [finding for other in others for finding in found(other, facts) if finding.outcome is FAILED] == []


def test_numpy_1_is_only_written_and_still_told() -> None:
    imports = ImportFacts(modules={"numpy": FINE, "cv2": Imported(outcome="ok", written=NUMPY_1)})
    assert one("numpy-abi", MachineFacts(imports=imports)) == (
        WARNING,
        golden("doctor.doctor_environment.import-cv2-complains"),
        golden("doctor.doctor_environment.upgrade-force-reinstall", PIP=PIP, PYTHON=PYTHON),
    )


def test_a_crash_a_hang_and_what_was_not_tried() -> None:
    modules = {
        "numpy": Imported(outcome="crashed", error="SIGSEGV ended the process", written="a\ncannot load it\n"),
        "scipy": Imported(outcome="hung", error="the process took too long"),
        "pandas": Imported(outcome="untried", error="the probe reached its time limit of 8 s before the import"),
        "cv2": Imported(outcome="untried", error="the probe reached its time limit of 8 s before the import"),
        "numba": Imported(outcome="absent"),
    }
    findings = found("imports", MachineFacts(imports=ImportFacts(modules=modules), interpreter=INTERPRETER))
    assert [(finding.outcome, finding.sentence) for finding in findings] == [
        (FAILED, golden("doctor.doctor_environment.import-numpy-process")),
        (UNKNOWN, golden("doctor.doctor_environment.import-scipy-did")),
        (UNKNOWN, golden("doctor.doctor_environment.tried-pandas-cv2")),
    ]
    assert findings[2].mend == "sgpu doctor --limit 60"


def test_what_is_installed_is_told() -> None:
    assert one("imports", MachineFacts(imports=IMPORTS, interpreter=INTERPRETER))[:2] == (
        OK,
        "torch 2.9.0, numpy 2.4.6",
    )
    absent = ImportFacts(modules={"torch": Imported(outcome="absent")})
    assert one("imports", MachineFacts(imports=absent))[:2] == (
        OK,
        golden("doctor.doctor_environment.none-usual-packages"),
    )
    assert found("cuda-libraries", MachineFacts(imports=absent)) == []
    assert found("torchvision", MachineFacts(imports=absent)) == []


def test_a_working_directory_that_is_gone() -> None:
    finding = found("shadowed-modules", MachineFacts(interpreter=INTERPRETER))[0]
    assert (finding.outcome, finding.mend) == (WARNING, "cd")


def test_requirements() -> None:
    broken = (
        Broken(package="torchvision", version="0.20", requirement="torch==2.5.0", found="2.9.0"),
        Broken(package="peft", version="0.21", requirement="accelerate>=1"),
    )
    findings = found("requirements", MachineFacts(python=PYTHON, interpreter=replace(INTERPRETER, broken=broken)))
    assert [(finding.sentence, finding.mend) for finding in findings] == [
        (golden("doctor.doctor_environment.torchvision-20-requires"), f"{PIP} 'torch==2.5.0'"),
        (golden("doctor.doctor_environment.peft-21-requires"), f"{PIP} 'accelerate>=1'"),
    ]
    unclear = replace(INTERPRETER, broken_problem="neither packaging nor pip")
    assert one("requirements", MachineFacts(interpreter=unclear)) == (
        UNKNOWN,
        golden("doctor.doctor_environment.neither-packaging-nor"),
        golden("doctor.doctor_environment.pip-check", PYTHON=PYTHON),
    )


@pytest.mark.parametrize(
    ("shadow", "outcome", "sentence"),
    [
        (
            Shadow(name="random", file="/home/me/random.py", other="random", is_stdlib=True),
            WARNING,
            "/home/me/random.py hides the standard library's random",
        ),
        (
            Shadow(name="torch", file="/home/me/torch.py", other="/s/torch/__init__.py"),
            FAILED,
            "/home/me/torch.py hides /s/torch/__init__.py",
        ),
        (
            Shadow(name="utils", file="/home/me/utils.py", other="/s/utils.py"),
            WARNING,
            "/home/me/utils.py hides /s/utils.py",
        ),
    ],
)
def test_files_that_hide_modules(shadow: Shadow, outcome: CheckOutcome, sentence: str) -> None:
    expected = (outcome, sentence, f"rename {shadow.file}")
    assert one("shadowed-modules", MachineFacts(interpreter=replace(INTERPRETER, shadows=(shadow,)))) == expected


@pytest.mark.parametrize(
    ("libraries", "outcome"),
    [
        ((), OK),
        (("/t/libgomp-1.so", "/s/libgomp-2.so"), OK),
        (("/t/libgomp-1.so", "/m/libiomp5.so"), WARNING),
        (("/t/libomp.so", "/m/libiomp5.so"), WARNING),
        (("/m/libiomp5.so",), OK),
    ],
)
def test_openmp_runtimes(libraries: tuple[str, ...], outcome: CheckOutcome) -> None:
    assert one("openmp", MachineFacts(imports=ImportFacts(openmp=libraries)))[0] is outcome


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("", OK),
        ("/my/project", OK),
        ("/my/project:/usr/lib/python3/dist-packages", WARNING),
        ("/usr/lib/python3.9/site-packages", FAILED),
        ("/usr/lib/python3.11/site-packages", WARNING),
    ],
)
def test_pythonpath(value: str, outcome: CheckOutcome) -> None:
    assert one("pythonpath", MachineFacts(environ={"PYTHONPATH": value}, interpreter=INTERPRETER))[0] is outcome


def test_downloads_from_the_hub() -> None:
    old = replace(INTERPRETER, packages={"huggingface-hub": "0.36.0"})
    facts = MachineFacts(environ={"HF_HUB_ENABLE_HF_TRANSFER": "1"}, interpreter=old)
    assert one("hf-transfer", facts) == (
        FAILED,
        golden("doctor.doctor_environment.hf-hub-enable"),
        golden("doctor.doctor_environment.hf-transfer-export", PIP=PIP),
    )
    there = replace(INTERPRETER, packages={"huggingface-hub": "0.36.0", "hf-transfer": "0.1"})
    assert one("hf-transfer", replace(facts, interpreter=there))[0] is OK
    newer = replace(INTERPRETER, packages={"huggingface-hub": "2.4.0"})
    assert one("hf-transfer", replace(facts, interpreter=newer))[0] is OK
    assert found("hf-transfer", replace(facts, interpreter=INTERPRETER)) == []
    assert found("hf-transfer", MachineFacts(interpreter=INTERPRETER)) == []


@pytest.mark.parametrize(
    ("module", "error", "code"),
    [("pandas", NUMPY_ABI, "numpy-abi"), ("torch", CUDNN, "cuda-libraries"), ("numba", "ImportError: x", "imports")],
)
def test_23B5_commands_to_copy_hold_in_a_path_with_spaces(module: str, error: str, code: str) -> None:
    python = "/home/me/a path/.venv/bin/python"
    imports = ImportFacts(modules={module: Imported(outcome="raised", error=error)})
    mends = [finding.mend for finding in found(code, MachineFacts(python=python, imports=imports)) if finding.mend]
    broken = replace(INTERPRETER, broken=(Broken(package="a", version="1", requirement="b>=1"),))
    mends += [finding.mend for finding in found("requirements", MachineFacts(python=python, interpreter=broken))]
    assert len(mends) == 2 and all(shlex.split(mend)[0] == python for mend in mends), mends
