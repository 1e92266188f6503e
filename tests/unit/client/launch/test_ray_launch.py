"""`ray_launch` before anything starts: options, in whose words they are refused, and the Ray that must be there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu import ray as ray_module
from serverless_gpu.client.decorator import DistributedFunction
from serverless_gpu.client.launch.preflight import RayInstallation, check_ray, find_ray, pack, ray_reference_reducer
from serverless_gpu.client.ray_launch import VALID, read_options
from serverless_gpu.errors import InvalidOption, InvalidValue, NotPicklable, RayMissing, UsageError
from serverless_gpu.model.spec import Options, RayCluster
from serverless_gpu.ray import ray_init, ray_launch
from tests.support.client.ray_launch import make_ray_package
from tests.support.golden import golden


def driver() -> str:
    return "driven"


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_it_makes_the_wrapper_that_distributed_makes() -> None:
    made = ray_launch(gpus=8, gpu_type="a10", remote=True)(driver)
    assert isinstance(made, DistributedFunction)
    assert made.spec.ray == RayCluster()
    assert (made.spec.resources.gpus, made.spec.resources.gpu_type, made.spec.remote) == (8, "A10", True)
    assert made.spec.name == "driver"


def test_a_direct_call_is_the_plain_function() -> None:
    assert ray_launch(gpus=1, gpu_type="CPU")(driver)() == "driven"


def test_a_run_without_ray_has_no_cluster() -> None:
    assert distributed(gpus=2)(driver).spec.ray is None


def test_what_was_decorated_before_is_the_driver() -> None:
    assert ray_launch(gpus=1)(distributed(gpus=2)(driver)).__wrapped__ is driver


def test_there_is_one_driver_however_many_devices_a_node_has() -> None:
    spec = ray_launch(gpus=8)(driver).spec
    assert spec.processes(8) == 1


@pytest.mark.parametrize(
    ("written", "bytes_"), [(None, None), (10**9, 10**9), ("20GB", 20 * 10**9), ("1GiB", 2**30), ("80MB", 80_000_000)]
)
def test_the_object_store(written: int | str | None, bytes_: int | None) -> None:
    spec = ray_launch(dashboard=True, object_store_memory=written)(driver).spec
    assert spec.ray == RayCluster(dashboard=True, object_store_bytes=bytes_)


def test_every_option_of_distributed_is_one_here_but_that_about_hangs() -> None:
    asked = {"gpus", "gpu_type", "remote", "timeout", "dashboard", "object_store_memory"}
    assert set(VALID) == {*Options.__annotations__, *asked} - {"hang_timeout", "init"}


# --- what is refused --------------------------------------------------------------------------------------------------

MISUSED = {
    "num_gpus_per_worker": "gpus=",
    "num_cpus_per_worker": "cpus=",
    "num_cpus": "cpus=",
    "min_workers": "gpus=",
    "max_workers": "gpus=",
    "max_worker_nodes": "gpus=",
    "num_worker_nodes": "gpus=",
    "num_gpus_worker_node": "gpus=",
    "num_cpus_head_node": "cpus=",
    "object_store_memory_worker_node": "object_store_memory=",
    "memory_worker_node": "memory=",
    "include_dashboard": "dashboard=True",
    "collect_log_to_path": "remove this option",
    "ray_temp_root_dir": "remove this option",
    "head_node_options": "remove this option",
    "runtime_env": "ray.init(...)",
    "hang_timeout": "idle_timeout=",
    "accelerator_type": "gpu_type=",
}


@pytest.mark.parametrize(("name", "instead"), MISUSED.items())
def test_a_name_of_somebody_elses_says_what_to_write_instead(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=golden("client.ray_launch.ray-launch-option", name=name)) as caught:
        ray_launch(gpus=1, **{name: 1})  # type: ignore[arg-type]  # what a user may write
    assert isinstance(caught.value, InvalidOption)
    said, _, valid = caught.value.hint.partition("; valid options: ")
    assert instead in said
    assert valid == ", ".join(VALID)


def test_what_is_to_be_written_instead_exists() -> None:
    for instead in MISUSED.values():
        name = instead.partition("=")[0]
        assert name in VALID or "=" not in instead


def test_what_is_nearly_a_name_of_somebody_elses() -> None:
    with pytest.raises(InvalidOption) as caught:
        read_options(False, None, {"max_worker": 2})
    assert "set gpus=" in caught.value.hint


def test_what_is_nearly_an_option() -> None:
    with pytest.raises(InvalidOption, match=re.escape(golden("client.ray_launch.dashbord-did-you"))):
        read_options(False, None, {"dashbord": True})


def test_what_is_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(InvalidOption, match=golden("client.ray_launch.ray-launch-option-colour")):
        read_options(False, None, {"colour": "red"})


@pytest.mark.parametrize("value", ["10MB", 79_999_999, "201GB"])
def test_an_object_store_that_ray_refuses(value: int | str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("client.ray_launch.between-80-mb"))):
        ray_launch(object_store_memory=value)


@pytest.mark.parametrize("value", ["much", True, 1.5])
def test_an_object_store_that_is_no_size(value: object) -> None:
    with pytest.raises(InvalidOption, match=re.escape(golden("client.ray_launch.object-store-memory"))):
        ray_launch(object_store_memory=value)  # type: ignore[arg-type]  # what a user may write


def test_a_dashboard_is_a_switch() -> None:
    with pytest.raises(InvalidOption, match=re.escape(golden("client.ray_launch.dashboard-must-true"))):
        ray_launch(dashboard=8265)  # type: ignore[arg-type]  # what a user may write


def test_the_dashboard_is_no_positional_argument() -> None:
    with pytest.raises(TypeError):
        ray_launch(1, "CPU", False, None, True)  # type: ignore[call-arg]  # what a user may write


def test_without_parentheses() -> None:
    with pytest.raises(InvalidOption, match=re.escape(golden("client.ray_launch.needs-parentheses-hint"))):
        ray_launch(driver)  # type: ignore[arg-type]  # what a user may write


# --- the Ray of the caller's environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.49.0", "2.49.1", "2.52.0", "2.60.0", "3.0.0.dev0", "10.1"])
def test_a_ray_that_makes_clusters(tmp_path: Path, version: str) -> None:
    check_ray(RayCluster(), RayInstallation(version, make_ray_package(tmp_path)))


def test_a_ray_without_metadata_is_left_to_the_rank(tmp_path: Path) -> None:
    check_ray(RayCluster(), RayInstallation("", make_ray_package(tmp_path)))


def test_a_ray_that_no_file_is_known_of_is_left_to_the_rank() -> None:
    check_ray(RayCluster(), RayInstallation("2.60.0", ""))


def test_no_ray_at_all_is_one_sentence_with_the_line_that_helps() -> None:
    with pytest.raises(RayMissing) as caught:
        check_ray(RayCluster(), RayInstallation("", ""))
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, UsageError)
    assert str(caught.value) == golden("client.ray_launch.ray-launch-needs")


def test_a_directory_that_has_rays_name_is_no_ray(tmp_path: Path) -> None:
    with pytest.raises(RayMissing, match="does not have"):
        check_ray(RayCluster(), RayInstallation("", make_ray_package(tmp_path, real=False)))


@pytest.mark.parametrize("version", ["2.48.0", "2.9.3", "1.13.0", "0.8.7"])
def test_a_ray_that_is_too_old(tmp_path: Path, version: str) -> None:
    with pytest.raises(RayMissing, match=golden("client.ray_launch.needs-ray-49", version=version)) as caught:
        check_ray(RayCluster(), RayInstallation(version, make_ray_package(tmp_path)))
    assert caught.value.hint == golden("client.ray_launch.pip-install-upgrade")


def test_a_dashboard_is_refused_where_ray_was_installed_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, absent = RayInstallation("2.60.0", make_ray_package(tmp_path)), {"aiohttp_cors"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    check_ray(RayCluster(), found)
    with pytest.raises(RayMissing, match=golden("client.ray_launch.dashboard-true-needs")) as caught:
        check_ray(RayCluster(dashboard=True), found)
    assert caught.value.hint == "pip install 'ray[default]'"
    absent.clear()
    check_ray(RayCluster(dashboard=True), found)


def test_a_file_of_the_users_that_hides_ray_is_named(tmp_path: Path) -> None:
    script = tmp_path / "ray.py"
    script.touch()
    with pytest.raises(RayMissing, match=r"ray\.py hides Ray 2\.60\.0") as caught:
        check_ray(RayCluster(), RayInstallation("2.60.0", str(script)))
    assert caught.value.hint == golden("client.ray_launch.give-another-name", script=script)


def test_a_directory_of_the_users_that_hides_ray_is_named(tmp_path: Path) -> None:
    with pytest.raises(RayMissing, match="hides Ray") as caught:
        check_ray(RayCluster(), RayInstallation("2.60.0", make_ray_package(tmp_path, real=False)))
    assert caught.value.hint == golden("client.ray_launch.give-another-name-2", value=tmp_path / "ray")


def test_finders_that_fail_are_as_if_there_was_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(importlib.metadata, "version", fail)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # which has no spec
    assert find_ray() == RayInstallation("", "")


@pytest.mark.parametrize("remote", [False, True])
def test_a_call_without_ray_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    monkeypatch.setattr("serverless_gpu.client.launch.preflight.find_ray", lambda: RayInstallation("", ""))
    with pytest.raises(RayMissing):
        ray_launch(gpus=1, gpu_type="CPU", remote=remote)(driver).submit()
    assert list(home.iterdir()) == []


def test_arguments_that_do_not_fit_are_said_before_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serverless_gpu.client.launch.preflight.find_ray", lambda: RayInstallation("", ""))
    with pytest.raises(TypeError, match=re.escape(golden("client.ray_launch.arguments-do-fit"))):
        ray_launch(gpus=1, gpu_type="CPU")(driver).distributed(3)  # type: ignore[call-arg]  # what a user may write


# --- what is of another cluster ---------------------------------------------------------------------------------------


class ObjectRef: ...


class ActorHandle: ...


@pytest.fixture
def callers_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("ray")
    vars(module).update(ObjectRef=ObjectRef, actor=types.SimpleNamespace(ActorHandle=ActorHandle))
    monkeypatch.setitem(sys.modules, "ray", module)


@pytest.mark.usefixtures("callers_ray")
@pytest.mark.parametrize("value", [ObjectRef(), ActorHandle()], ids=["object", "actor"])
def test_what_the_callers_own_cluster_has_does_not_travel(tmp_path: Path, value: object) -> None:
    held = {"kept": [1, value]}
    refuse = ray_reference_reducer(ray_launch(gpus=1)(driver).spec)
    with pytest.raises(NotPicklable) as caught:
        pack(str(tmp_path / "call.pkl"), lambda: held, (), {}, refuse)
    name = type(value).__name__
    assert golden("client.ray_launch.held-lambda-key", name__=__name__, name=name) in caught.value.message
    assert golden("client.ray_launch.ray-cluster-made", name=name) in caught.value.message
    assert not (tmp_path / "call.pkl").exists()


@pytest.mark.usefixtures("callers_ray")
def test_everything_else_does(tmp_path: Path) -> None:
    spec = ray_launch(gpus=1)(driver).spec
    assert (
        pack(str(tmp_path / "call.pkl"), driver, ([ObjectRef, {"a": 1}],), {}, ray_reference_reducer(spec)).size_bytes
        > 0
    )


@pytest.mark.usefixtures("callers_ray")
def test_only_runs_that_have_a_cluster_of_their_own_refuse() -> None:
    assert ray_reference_reducer(distributed(gpus=1)(driver).spec) is None


def test_without_ray_in_the_calling_process_there_is_nothing_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert ray_reference_reducer(ray_launch(gpus=1)(driver).spec) is None


# --- ray_init ---------------------------------------------------------------------------------------------------------


class Pretended(types.ModuleType):
    """A Ray that remembers how it was initialised."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def init(self, *args: object, **kwargs: object) -> str:
        self.calls.append((args, kwargs))
        return "context"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    for name in ("SGPU_RUN_ID", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    module = Pretended()
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


@pytest.fixture
def in_a_run(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    monkeypatch.setenv("SGPU_RUN_ID", "run")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    return pretended


def test_outside_of_a_run_it_is_rays_own(pretended: Pretended) -> None:
    assert ray_init("local", num_cpus=2, include_dashboard=True) == "context"
    assert pretended.calls == [(("local",), {"num_cpus": 2, "include_dashboard": True})]


def test_in_a_run_it_connects_and_may_have_been_called_before(in_a_run: Pretended) -> None:
    ray_init(namespace="mine", runtime_env={"env_vars": {"A": "1"}})
    environment = {"namespace": "mine", "runtime_env": {"env_vars": {"A": "1"}}, "ignore_reinit_error": True}
    assert in_a_run.calls == [((), environment)]


def test_what_the_user_says_about_a_second_call_stays(in_a_run: Pretended) -> None:
    ray_init(ignore_reinit_error=False)
    assert in_a_run.calls == [((), {"ignore_reinit_error": False})]


@pytest.mark.parametrize("name", ["num_cpus", "num_gpus", "resources", "object_store_memory"])
def test_in_a_run_the_size_of_the_cluster_cannot_be_said(in_a_run: Pretended, name: str) -> None:
    with pytest.raises(InvalidOption, match=golden("client.ray_launch.cannot-said-hint", name=name)):
        ray_init(**{name: 1})
    assert in_a_run.calls == []


def test_a_cluster_of_ones_own_may_have_any_size_in_a_run(in_a_run: Pretended) -> None:
    ray_init(address="local", num_cpus=1)
    assert in_a_run.calls == [((), {"address": "local", "num_cpus": 1})]


def test_without_ray_the_line_that_helps_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ray\[default\]'"):
        ray_init()


# --- the door ---------------------------------------------------------------------------------------------------------


def test_the_door_has_its_names() -> None:
    assert set(ray_module.__all__) <= set(dir(ray_module))
    with pytest.raises(AttributeError, match=golden("client.ray_launch.module-serverless-gpu")):
        _ = ray_module.launch
