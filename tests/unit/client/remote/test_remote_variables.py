"""Which of the caller's variables travel."""

from __future__ import annotations

from serverless_gpu.client.caller_context import variables_elsewhere, variables_here

MINE = {
    "HF_TOKEN": "hf",
    "AWS_ACCESS_KEY_ID": "a",
    "OMP_NUM_THREADS": "4",
    "LANG": "C.UTF-8",
    "http_proxy": "p",
}
OF_THE_MACHINE = {
    "HOME": "/home/me",
    "PATH": "/home/me/venv/bin:/usr/bin",
    "VIRTUAL_ENV": "/home/me/venv",
    "TMPDIR": "/scratch/me",
    "CUDA_VISIBLE_DEVICES": "3",
    "LD_LIBRARY_PATH": "/opt/cuda",
    "SSH_AUTH_SOCK": "/tmp/s",
    "XDG_RUNTIME_DIR": "/run/user/1",
    "SLURM_JOB_ID": "1",
    "SERVERLESS_GPU_HOME": "/home/me/.serverless_gpu",
    "SGPU_RUN_ID": "r",
    "DISPLAY": ":0",
}
SECRET = {"SERVERLESS_GPU_TOKEN": "sgpu_secret"}


def test_what_means_the_same_everywhere_travels_and_what_names_the_callers_machine_does_not() -> None:
    assert variables_elsewhere({**MINE, **OF_THE_MACHINE, **SECRET}) == MINE


def test_on_the_callers_own_machine_everything_but_the_token_travels() -> None:
    assert variables_here({**MINE, **OF_THE_MACHINE, **SECRET}) == {**MINE, **OF_THE_MACHINE}
