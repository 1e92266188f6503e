"""Requests are met with devices that are there, or refused with what is; ranks are told exactly their place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import (
    GpuTypeMismatch,
    InvalidValue,
    NoGpu,
    NotEnoughGpus,
    ServerlessGpuError,
    UnknownGpuType,
)
from serverless_gpu.model.hardware import CATALOGUE, GIB, Device, DeviceKind, GpuType, cpu_slots, parse_fake
from serverless_gpu.model.placement import (
    Candidates,
    RankPlace,
    candidates,
    rank_variables,
    restrict,
    share_of_cores,
    threads_per_rank,
)
from tests.support.golden import golden


def gpu(index: int, uuid: str, gpu_type: str = "H100") -> Device:
    return Device(uuid=uuid, index=index, type=gpu_type, memory_bytes=80 * GIB, kind=DeviceKind.GPU, product=gpu_type)


SLOTS = cpu_slots(2)
H100S = parse_fake("H100:2")
MIXED = parse_fake("H100:4,A10:2")
REAL = (gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33"))
K80 = (gpu(0, "GPU-1", "Tesla K80"),)
NO_GPU_HINT = (
    'hint: gpu_type="CPU" runs on CPU slots, SERVERLESS_GPU_FAKE="H100:8" creates fake GPUs. '
    "GPUs that CUDA_VISIBLE_DEVICES hides do not count"
)


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["GPU-aa11", "GPU-aa22", "GPU-bb33"]),
        ("", []),
        ("-1", []),
        ("0", ["GPU-aa11"]),
        ("2,0", ["GPU-bb33", "GPU-aa11"]),
        (" 1 , 2 ", ["GPU-aa22", "GPU-bb33"]),
        ("01", ["GPU-aa22"]),
        ("0,1,2", ["GPU-aa11", "GPU-aa22", "GPU-bb33"]),
        ("1,7,0", ["GPU-aa22"]),
        ("1,-1,0", ["GPU-aa22"]),
        ("1,,0", ["GPU-aa22"]),
        ("1,two,0", ["GPU-aa22"]),
        ("²", []),
        ("9" * 5000, []),
        ("0,0", []),
        ("1,0,1", []),
        ("GPU-bb33,GPU-aa11", ["GPU-bb33", "GPU-aa11"]),
        ("GPU-b", ["GPU-bb33"]),
        ("GPU-bb33,GPU-aa", ["GPU-bb33"]),
        ("GPU-aa", []),
        ("GPU-", []),
        ("GPU-bb33,GPU-b", []),
        ("GPU-zz,GPU-bb33", []),
        ("gpu-bb33", []),
        ("bb33", []),
        ("0,GPU-bb33", ["GPU-aa11"]),
        ("GPU-bb33,0", ["GPU-bb33"]),
        ("all", []),
    ],
)
def test_the_callers_own_variable_is_read_as_cuda_reads_it(variable: str | None, uuids: list[str]) -> None:
    assert [device.uuid for device in restrict(REAL, variable)] == uuids


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["CPU-0", "CPU-1", "FAKE-H100-0", "FAKE-H100-1", "FAKE-CPU-0"]),
        ("", ["CPU-0", "CPU-1", "FAKE-CPU-0"]),
        ("1", ["FAKE-H100-1", "CPU-0", "CPU-1", "FAKE-CPU-0"]),
        ("FAKE-H100-1,FAKE-H100-0", ["FAKE-H100-1", "FAKE-H100-0", "CPU-0", "CPU-1", "FAKE-CPU-0"]),
        ("2", ["CPU-0", "CPU-1", "FAKE-CPU-0"]),
        ("CPU-0", ["CPU-0", "CPU-1", "FAKE-CPU-0"]),
    ],
)
def test_fakes_are_hidden_like_gpus_and_cpu_slots_are_not(variable: str | None, uuids: list[str]) -> None:
    devices = (*SLOTS, *parse_fake("H100:2,CPU:1"))
    assert [device.uuid for device in restrict(devices, variable)] == uuids


def test_an_index_is_the_devices_own_and_not_its_position() -> None:
    assert restrict((REAL[2], REAL[0]), "2") == (REAL[2],)
    assert restrict((REAL[2], REAL[0]), "1") == ()


def test_a_few_letters_are_no_uuid_even_where_only_one_device_has_them() -> None:
    assert restrict(REAL[:1], "GPU") == ()


ENTRIES = st.sampled_from(["0", "1", "2", "3", "-1", "", "GPU-aa11", "GPU-b", "GPU-", "GPU-aa", "CPU-0", "x", " 1"])


@given(st.permutations([*REAL, *SLOTS]), st.one_of(st.none(), st.lists(ENTRIES).map(",".join), st.text()))
def test_restricting_never_yields_a_device_that_was_not_there(devices: list[Device], variable: str | None) -> None:
    visible = restrict(devices, variable)
    assert set(visible) <= set(devices)
    assert len(set(visible)) == len(visible)
    assert set(SLOTS) <= set(visible)


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "devices", "count", "fitting"),
    [
        (None, None, (*H100S, *SLOTS), 2, H100S),
        (1, None, (*H100S, *SLOTS), 1, H100S),
        (2, "h100", (*H100S, *SLOTS), 2, H100S),
        (None, "GPU_8xH100", H100S, 2, H100S),
        (None, "H100", MIXED, 4, MIXED[:4]),
        (1, "A10", MIXED, 1, MIXED[4:]),
        (None, "CPU", (*H100S, *SLOTS), 2, SLOTS),
        (1, "cpu", SLOTS, 1, SLOTS),
        (8, "CPU", (*parse_fake("CPU:8"), *SLOTS), 8, parse_fake("CPU:8")),
        (None, "CPU", (*SLOTS, *parse_fake("H100:1,CPU:3")), 3, parse_fake("H100:1,CPU:3")[1:]),
        (None, None, (*SLOTS, *parse_fake("H100:1,CPU:3")), 1, parse_fake("H100:1")),
        (3, "A100", parse_fake("A100-40:2,A100-80:2"), 3, parse_fake("A100-40:2,A100-80:2")),
        (None, "A100-80", parse_fake("A100-40:2,A100-80:2"), 2, parse_fake("A100-40:2,A100-80:2")[2:]),
        (None, None, K80, 1, K80),
        (1, "tesla k80", K80, 1, K80),
        (1, "Tesla K80", K80, 1, K80),
    ],
)
def test_a_request_gets_every_device_that_fits(
    gpus: int | None, gpu_type: str | None, devices: tuple[Device, ...], count: int, fitting: tuple[Device, ...]
) -> None:
    assert candidates(gpus=gpus, gpu_type=gpu_type, devices=devices) == Candidates(count=count, devices=fitting)


def test_own_types_can_be_asked_for() -> None:
    own = (GpuType(name="K80", memory_bytes=12 * GIB, aliases=("Kepler",)),)
    devices = (gpu(0, "GPU-1", "K80"),)
    assert candidates(gpus=1, gpu_type="kepler", devices=devices, own=own) == Candidates(count=1, devices=devices)


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "devices", "error", "text"),
    [
        (
            0,
            "H100",
            H100S,
            InvalidValue,
            "gpus must be at least 1, not 0\nhint: leave gpus out to use every GPU of the machine",
        ),
        (
            -8,
            None,
            (),
            InvalidValue,
            "gpus must be at least 1, not -8\nhint: leave gpus out to use every GPU of the machine",
        ),
        (None, None, SLOTS, NoGpu, f"this machine has no GPU\n{NO_GPU_HINT}"),
        (8, None, (), NoGpu, f"this machine has no GPU\n{NO_GPU_HINT}"),
        (None, None, parse_fake("CPU:8"), NoGpu, f"this machine has no GPU\n{NO_GPU_HINT}"),
        (8, "h100", SLOTS, NoGpu, f"the run requests H100, but this machine has no GPU\n{NO_GPU_HINT}"),
        (
            1,
            None,
            MIXED,
            InvalidValue,
            "this machine has several GPU types (4 H100, 2 A10) and gpu_type does not select one\n"
            'hint: use gpu_type="H100" or gpu_type="A10"',
        ),
        (
            1,
            "H100",
            (*parse_fake("A10:2"), *SLOTS),
            GpuTypeMismatch,
            'the run requests H100, but this machine has 2 A10\nhint: use gpu_type="A10", or leave gpu_type out',
        ),
        (
            None,
            "L4",
            MIXED,
            GpuTypeMismatch,
            'the run requests L4, but this machine has 4 H100, 2 A10\nhint: use gpu_type="H100" or gpu_type="A10"',
        ),
        (
            1,
            "A100-80",
            parse_fake("A100-40:1"),
            GpuTypeMismatch,
            "the run requests A100-80, but this machine has 1 A100-40\n"
            'hint: use gpu_type="A100-40", or leave gpu_type out',
        ),
        (
            8,
            "H100",
            (*H100S, *SLOTS),
            NotEnoughGpus,
            "the run requests 8 H100, but this machine has 2\n"
            "hint: use gpus=2, or leave gpus out to use all. GPUs that CUDA_VISIBLE_DEVICES hides do not count",
        ),
        (
            3,
            None,
            H100S,
            NotEnoughGpus,
            "the run requests 3 H100, but this machine has 2\n"
            "hint: use gpus=2, or leave gpus out to use all. GPUs that CUDA_VISIBLE_DEVICES hides do not count",
        ),
        (
            8,
            "CPU",
            (*H100S, *SLOTS),
            NotEnoughGpus,
            "the run requests 8 CPU slots, but this machine has 2\n"
            'hint: SERVERLESS_GPU_FAKE="CPU:8" creates as many slots, regardless of the number of cores',
        ),
        (
            None,
            "CPU",
            H100S,
            NotEnoughGpus,
            "the run requests 1 CPU slot, but this machine has 0\n"
            'hint: SERVERLESS_GPU_FAKE="CPU:1" creates as many slots, regardless of the number of cores',
        ),
    ],
)
def test_a_request_that_cannot_be_met_says_what_is_there_and_what_to_do(
    gpus: int | None,
    gpu_type: str | None,
    devices: tuple[Device, ...],
    error: type[ServerlessGpuError],
    text: str,
) -> None:
    with pytest.raises(error) as refused:
        candidates(gpus=gpus, gpu_type=gpu_type, devices=devices)
    assert type(refused.value) is error
    assert str(refused.value) == text


def test_an_unknown_type_is_answered_with_the_cards_that_are_there_too() -> None:
    known = ", ".join(["Tesla K80", *(gpu_type.name for gpu_type in CATALOGUE)])
    with pytest.raises(UnknownGpuType) as refused:
        candidates(gpus=1, gpu_type="Tesla K8", devices=(*K80, *H100S))
    assert str(refused.value) == golden("model.placement.unknown-gpu-type", known=known)


@given(
    st.one_of(st.none(), st.integers(min_value=-2, max_value=8)),
    st.sampled_from([None, "H100", "a10", "A100", "CPU", "B200", "nonsense"]),
    st.dictionaries(st.sampled_from(["H100", "A10", "A100-40", "A100-80", "CPU"]), st.integers(1, 4)),
)
def test_what_is_offered_was_there_and_is_enough(
    gpus: int | None, gpu_type: str | None, counts: dict[str, int]
) -> None:
    fakes = parse_fake(",".join(f"{name}:{count}" for name, count in counts.items())) if counts else ()
    try:
        offer = candidates(gpus=gpus, gpu_type=gpu_type, devices=(*fakes, *SLOTS))
    except ServerlessGpuError as refused:
        assert refused.hint
    else:
        assert set(offer.devices) <= {*fakes, *SLOTS}
        assert len(offer.devices) >= offer.count == (gpus or len(offer.devices))


PLACE = RankPlace(rank=5, local_rank=1, node_rank=2, world_size=6, local_world_size=2, num_nodes=3)
COMMON = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "2",
    "GROUP_RANK": "2",
    "NUM_NODES": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run1",
    "SGPU_RUN_ID": "run1",
    "SGPU_FENCE": "7",
    "PYTHONUNBUFFERED": "1",
}


@pytest.mark.parametrize(
    ("devices", "own"),
    [
        (
            (REAL[2], REAL[0]),
            {
                "SGPU_GPU_UUIDS": "GPU-bb33,GPU-aa11",
                "CUDA_VISIBLE_DEVICES": "2,0",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            },
        ),
        (
            MIXED[4:],
            {
                "SGPU_GPU_UUIDS": "FAKE-A10-0,FAKE-A10-1",
                "CUDA_VISIBLE_DEVICES": "4,5",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            },
        ),
        (SLOTS, {"SGPU_GPU_UUIDS": "CPU-0,CPU-1", "CUDA_VISIBLE_DEVICES": ""}),
        (parse_fake("CPU:2"), {"SGPU_GPU_UUIDS": "FAKE-CPU-0,FAKE-CPU-1", "CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_a_rank_is_told_its_place_and_all_devices_of_its_node(devices: tuple[Device, ...], own: dict[str, str]) -> None:
    variables = rank_variables(PLACE, devices=devices, run_id="run1", fence=7, master=("127.0.0.1", 29500))
    assert variables == {**COMMON, **own}


@pytest.mark.parametrize(
    ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes"),
    [
        (2, 0, 0, 2, 2, 1),
        (-1, 0, 0, 2, 2, 1),
        (0, 2, 0, 2, 2, 1),
        (0, -1, 0, 2, 2, 1),
        (0, 0, 1, 2, 2, 1),
        (0, 0, -1, 2, 2, 1),
        (0, 0, 0, 2, 3, 1),
        (0, 0, 0, 0, 0, 0),
    ],
)
def test_a_place_outside_its_gang_is_refused(
    rank: int, local_rank: int, node_rank: int, world_size: int, local_world_size: int, num_nodes: int
) -> None:
    with pytest.raises(InvalidValue) as refused:
        RankPlace(
            rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            num_nodes=num_nodes,
        )
    assert str(refused.value) == golden(
        "model.placement.rank-can-stand",
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
    )


@pytest.mark.parametrize(
    ("cores", "devices", "of_type", "share"),
    [
        (64, 8, 8, 64),
        (64, 1, 8, 8),
        (64, 4, 8, 32),
        (2, 1, 2, 1),
        (2, 8, 8, 2),
        (2, 1, 8, 1),
        (4, 2, 0, 4),
        (7, 1, 2, 3),
    ],
)
def test_cores_go_with_devices(cores: int, devices: int, of_type: int, share: int) -> None:
    assert share_of_cores(cores, devices, of_type) == share


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(16, 8, 2), (17, 8, 2), (8, 8, 1), (2, 8, 1), (96, 1, 96)])
def test_ranks_share_the_cores_and_none_goes_without(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads
