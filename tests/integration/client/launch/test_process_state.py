"""What knows only the process it was made in: left behind, made again in the rank, or refused."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from serverless_gpu.client.launch import preflight
from serverless_gpu.errors import NotPicklable
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.node.inside import call, payload, process_group
from tests.support.golden import golden
from tests.support.node.rank_process import run_rank

# As transformers has it: made with all of them, kept in the instance, the device first asked for by `__post_init__`.
TRANSFORMERS = textwrap.dedent(
    """
    import os
    from functools import cached_property

    class TrainingArguments:
        def __init__(self, output_dir):
            self.output_dir = output_dir
            self._setup_devices

        @cached_property
        def _setup_devices(self):
            self.distributed_state = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
            self._n_gpu = 1
            return "device"

        @property
        def world_size(self):
            return self.distributed_state[1]

    class SFTConfig(TrainingArguments):
        pass
    """
)


@pytest.fixture
def transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a stand-in for `transformers.training_args`, importable by this process and by ranks."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "training_args.py").write_text(TRANSFORMERS)
    module = ModuleType("transformers.training_args")
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.training_args", module)
    exec(TRANSFORMERS, module.__dict__)
    return module


@pytest.mark.parametrize("name", ["TrainingArguments", "SFTConfig"])
def test_23A1_training_arguments_of_an_earlier_cell_take_their_place_in_the_rank(
    name: str, transformers: ModuleType, tmp_path: Path
) -> None:
    args = vars(transformers)[name]("out")
    assert args.world_size == 1
    path = str(tmp_path / "call.pkl")
    call.dump_call(path, function=print, args=(args,), kwargs={}, sources={})
    said = run_rank(
        """
import os
os.environ.update(RANK="1", WORLD_SIZE="2")
args = call.load_call(sys.argv[2]).args[0]
print(args.output_dir, sorted(vars(args)), payload.join_late(), args.distributed_state, args.world_size)
print(payload.join_late())
""",
        path,
        path=tmp_path,
    )
    assert said == golden("client.process_state.out-output-dir")


def test_23A1_arguments_that_a_rank_returns_know_nothing_of_the_rank(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = payload.dumps(transformers.TrainingArguments("out"))
    monkeypatch.delenv("WORLD_SIZE")
    again = payload.loads(data)
    assert isinstance(again, transformers.TrainingArguments)
    assert again.world_size == 1  # looked for when it is asked for
    with pytest.raises(AttributeError):
        transformers.TrainingArguments.distributed_state  # noqa: B018 - the class has none, as before


class Accelerator:
    """As accelerate's: what it prepared is prepared for one process."""

    num_processes = 1


class PartialState:
    """As accelerate's."""


class Trainer:
    """As Lightning's: it has chosen a strategy for one process."""


class LightningDataModule:
    """As Lightning's: it keeps the trainer that used it."""

    trainer: Trainer | None = None


def test_23A1_a_data_module_travels_without_the_trainer_that_used_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch.trainer.trainer", SimpleNamespace(Trainer=Trainer))
    datamodule = SimpleNamespace(LightningDataModule=LightningDataModule)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.core.datamodule", datamodule)
    data = LightningDataModule()
    data.trainer, vars(data)["path"] = Trainer(), "/data"
    path = str(tmp_path / "call.pkl")
    preflight.pack(path, print, (data,), {}, preflight.refusing_reducer(RunSpec(resources=Resources())))
    assert vars(call.load_call(path).args[0]) == {"trainer": None, "path": "/data"}
    assert data.trainer is not None


@pytest.mark.parametrize("kind", [Accelerator, PartialState, Trainer])
def test_23A1_what_is_set_up_for_one_process_is_refused_by_name(
    kind: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", SimpleNamespace(Accelerator=Accelerator))
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(PartialState=PartialState))
    monkeypatch.setitem(sys.modules, "pytorch_lightning.trainer.trainer", SimpleNamespace(Trainer=Trainer))
    trainer = SimpleNamespace(accelerator=kind())
    vars(trainer.accelerator)["trainer"] = trainer  # each knows the other

    def train() -> object:
        return trainer.accelerator

    refuse = preflight.refusing_reducer(RunSpec(resources=Resources()))
    with pytest.raises(NotPicklable) as caught:
        preflight.pack(str(tmp_path / "call.pkl"), train, (), {}, refuse)
    assert golden("client.process_state.closure-variable-trainer", name__=__name__, name___2=kind.__name__) in (
        str(caught.value)
    )
    assert golden("client.process_state.every-rank-used") in str(caught.value)


def test_23A1_a_second_process_group_is_explained_where_captured_arguments_made_the_first() -> None:
    said = run_rank(
        """
error = ValueError("trying to initialize the default process group twice!")
failure.tell_of_joining(error)
failure.tell_of_joining(other := ValueError("twice"))
print(error.__notes__[0].partition(", which ")[0], hasattr(other, "__notes__"))
"""
    )
    assert said == golden("client.process_state.call-carries-trainingarguments")


CASES = (
    ("", False),
    ("train()", True),
    ("train(); join()", False),
    ("join(); dist.destroy_process_group(); train()", False),
    ("train(); sys.modules['mpi4py.MPI'] = sys", False),
    ("train(); os.environ[process_group.ALONE_NOTE_SWITCH] = '0'", False),
)


@pytest.mark.long
@pytest.mark.torch
def test_23A1_a_rank_knows_whether_it_trained_without_the_others() -> None:
    said = run_rank(
        """
import os, torch, torch.distributed as dist
from _sgpu_inside import process_group
def train():
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
def join():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for code in sys.argv[2:]:
    if os.fork() == 0:
        exec(code)
        print(process_group.trained_alone(2), flush=True)
        os._exit(0)
    os.wait()
""",
        *(code for code, _ in CASES),
    )
    assert said.split() == [str(is_alone) for _, is_alone in CASES]


def test_23A1_one_rank_is_no_gang() -> None:
    assert not process_group.trained_alone(1)
