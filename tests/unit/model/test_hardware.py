"""Names, product strings and fakes are read as the cards they mean, and as no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue, UnknownGpuType
from serverless_gpu.model.hardware import (
    CATALOGUE,
    FAKE_DEVICES_MAX,
    FAMILIES,
    GIB,
    Device,
    DeviceKind,
    GpuType,
    canonical,
    census,
    cpu_slots,
    find_type,
    is_listed,
    matches,
    parse_fake,
    recognise,
    time_unit,
)
from tests.support.golden import golden

MIB = 2**20
NAMES = [gpu_type.name for gpu_type in CATALOGUE]
KNOWN = (
    "A10, A10G, A16, A2, A30, A40, A100, A100-40, A100-80, H20, H100, H200, GH200, B200, B300, GB200, GB300, L4, L40, "
    "L40S, P100, T4, V100, RTX-3090, RTX-4090, RTX-5090, RTX-A4000, RTX-A5000, RTX-A6000, RTX-6000-Ada, RTX-PRO-6000, "
    "CPU"
)
FAKE_HINT = 'hint: write types and counts, for example SERVERLESS_GPU_FAKE="H100:8" or "H100:4,A10:2"'

# What `nvidia-smi -L` prints, the MiB it reports, and the type.
CARDS = [
    ("NVIDIA A10", 23_028, "A10"),
    ("NVIDIA A10G", 23_028, "A10G"),
    ("NVIDIA A16", 15_356, "A16"),
    ("NVIDIA A2", 15_356, "A2"),
    ("NVIDIA A30", 24_576, "A30"),
    ("NVIDIA A40", 46_068, "A40"),
    ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40"),
    ("NVIDIA A100-PCIE-40GB", 40_960, "A100-40"),
    ("A100-SXM4-40GB", 40_537, "A100-40"),
    ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80"),
    ("NVIDIA A100-SXM-80GB", 81_251, "A100-80"),
    ("NVIDIA A100 80GB PCIe", 81_920, "A100-80"),
    ("NVIDIA A100", 40_960, "A100-40"),
    ("NVIDIA A100", 81_920, "A100-80"),
    ("NVIDIA H20", 97_871, "H20"),
    ("NVIDIA H100 80GB HBM3", 81_559, "H100"),
    ("NVIDIA H100 PCIe", 81_559, "H100"),
    ("NVIDIA H100 NVL", 95_830, "H100"),
    ("NVIDIA H200", 143_771, "H200"),
    ("NVIDIA H200 NVL", 143_771, "H200"),
    ("NVIDIA GH200 480GB", 97_871, "GH200"),
    ("NVIDIA GH200 144G HBM3e", 146_831, "GH200"),
    ("NVIDIA B200", 183_359, "B200"),
    ("NVIDIA B300 SXM6 AC", 275_040, "B300"),
    ("NVIDIA GB200", 189_471, "GB200"),
    ("NVIDIA GB300", 284_208, "GB300"),
    ("NVIDIA L4", 23_034, "L4"),
    ("NVIDIA L40", 46_068, "L40"),
    ("NVIDIA L40S", 46_068, "L40S"),
    ("Tesla P100-PCIE-16GB", 16_280, "P100"),
    ("Tesla T4", 15_360, "T4"),
    ("Tesla T4", 15_109, "T4"),
    ("Tesla V100-SXM2-16GB", 16_160, "V100"),
    ("Tesla V100-SXM2-32GB", 32_510, "V100"),
    ("NVIDIA GeForce RTX 3090", 24_576, "RTX-3090"),
    ("NVIDIA GeForce RTX 4090", 24_564, "RTX-4090"),
    ("NVIDIA GeForce RTX 5090", 32_607, "RTX-5090"),
    ("NVIDIA RTX A4000", 16_376, "RTX-A4000"),
    ("NVIDIA RTX A5000", 24_564, "RTX-A5000"),
    ("NVIDIA RTX A6000", 49_140, "RTX-A6000"),
    ("NVIDIA RTX 6000 Ada Generation", 49_140, "RTX-6000-Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97_887, "RTX-PRO-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTX-PRO-6000"),
]

# Cards that only look like one of ours.
STRANGERS = [
    ("Tesla K80", 11_441),
    ("NVIDIA A800-SXM4-80GB", 81_920),
    ("NVIDIA T4G", 15_360),
    ("Quadro RTX 6000", 24_576),
    ("NVIDIA GeForce RTX 3090 Ti", 24_564),
    ("NVIDIA GeForce RTX 4090 D", 24_564),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864),
    ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 81_152),
    ("NVIDIA H100", 65_247),
    ("GRID T4-8Q", 8_192),
    ("NVIDIA A10-4Q", 4_096),
]


@pytest.mark.parametrize(("product", "mib", "name"), CARDS)
def test_a_card_is_recognised_by_its_product_string(product: str, mib: int, name: str) -> None:
    assert recognise(product, mib * MIB) == name


@pytest.mark.parametrize(("product", "mib"), STRANGERS)
def test_a_stranger_keeps_its_product_string(product: str, mib: int) -> None:
    assert recognise(product, mib * MIB) == product


def test_every_type_that_can_be_plugged_in_has_a_card_that_is_recognised() -> None:
    recognised = {name for *_, name in CARDS}
    assert [name for name in NAMES if name not in recognised] == ["A100", "CPU"]


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100", "A100-40"),
        ("NVIDIA H200", "H200"),
        ("  Tesla K80 ", "Tesla K80"),
        ("", "UNKNOWN"),
    ],
)
def test_a_card_whose_memory_is_not_known_is_recognised_by_name(product: str, name: str) -> None:
    assert recognise(product, 0) == name


OWN = (
    GpuType(name="V100-32", memory_bytes=32 * GIB, aliases=("volta big",), products=("V100",)),
    GpuType(name="K80", memory_bytes=12 * GIB, products=("Tesla K80",)),
    GpuType(name="Slice", memory_bytes=5 * GIB, products=("A100-SXM4-40GB MIG 1g.5gb", "")),
)


@pytest.mark.parametrize(
    ("product", "mib", "name"),
    [
        ("Tesla V100-SXM2-32GB", 32_510, "V100-32"),
        ("Tesla V100-SXM2-16GB", 16_160, "V100"),
        ("Tesla K80", 11_441, "K80"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, "Slice"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40"),
    ],
)
def test_own_types_win_where_they_fit(product: str, mib: int, name: str) -> None:
    assert recognise(product, mib * MIB, OWN) == name


@given(st.text(max_size=40), st.integers(min_value=0, max_value=300 * GIB))
def test_any_product_string_has_a_type(product: str, memory_bytes: int) -> None:
    assert recognise(product, memory_bytes) in {*NAMES, product.strip(), "UNKNOWN"} - {""}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100"),
        ("h100", "H100"),
        ("h100_80gb", "H100"),
        ("GPU_8xH100", "H100"),
        ("GPU_1xA10", "A10"),
        ("gpu_16xa100-80", "A100-80"),
        ("A10", "A10"),
        ("A10G", "A10G"),
        ("A100", "A100"),
        ("a100_80gb", "A100-80"),
        ("A100 80GB PCIe", "A100-80"),
        ("rtx 4090", "RTX-4090"),
        ("rtx6000ada", "RTX-6000-Ada"),
        ("A6000", "RTX-A6000"),
        ("cpu", "CPU"),
    ],
)
def test_a_name_is_found_however_it_is_spelled(written: str, name: str) -> None:
    assert find_type(written).name == name
    assert canonical(written) == name
    assert is_listed(written)


def test_every_name_and_alias_means_one_type() -> None:
    meant = [(name, gpu_type) for gpu_type in CATALOGUE for name in (gpu_type.name, *gpu_type.aliases)]
    assert [find_type(name) for name, _ in meant] == [gpu_type for _, gpu_type in meant]


def test_memory_of_the_catalogue() -> None:
    assert {gpu_type.name: gpu_type.memory_bytes // GIB for gpu_type in CATALOGUE} == {
        "A10": 24,
        "A10G": 24,
        "A16": 16,
        "A2": 16,
        "A30": 24,
        "A40": 48,
        "A100": 40,
        "A100-40": 40,
        "A100-80": 80,
        "H20": 96,
        "H100": 80,
        "H200": 141,
        "GH200": 96,
        "B200": 180,
        "B300": 268,
        "GB200": 185,
        "GB300": 277,
        "L4": 24,
        "L40": 48,
        "L40S": 48,
        "P100": 16,
        "T4": 16,
        "V100": 16,
        "RTX-3090": 24,
        "RTX-4090": 24,
        "RTX-5090": 32,
        "RTX-A4000": 16,
        "RTX-A5000": 24,
        "RTX-A6000": 48,
        "RTX-6000-Ada": 48,
        "RTX-PRO-6000": 96,
        "CPU": 0,
    }


def test_own_types_are_found_first_by_name_alias_and_shape() -> None:
    mine = GpuType(name="H100", memory_bytes=94 * GIB)
    assert find_type("h100", (mine,)) is mine
    assert find_type("GPU_2xVolta-Big", OWN) is OWN[0]
    assert find_type("A10", OWN).name == "A10"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H1000", "did you mean 'H100'?"),
        ("rtx 490", "did you mean 'RTX-4090'?"),
        ("GPU_8xH1OO", "use one of the known names, in any spelling of case, spaces, '-' and '_'"),
        ("TPU-v5", "use one of the known names, in any spelling of case, spaces, '-' and '_'"),
        ("", "use one of the known names, in any spelling of case, spaces, '-' and '_'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, hint: str) -> None:
    assert canonical(name) == name
    assert not is_listed(name)
    with pytest.raises(UnknownGpuType) as refused:
        find_type(name)
    assert str(refused.value) == golden("model.hardware.unknown-gpu-type", name=name, KNOWN=KNOWN, hint=hint)


def test_an_unknown_name_is_answered_with_own_types_too() -> None:
    with pytest.raises(UnknownGpuType) as refused:
        find_type("K8", OWN)
    assert str(refused.value) == golden("model.hardware.unknown-gpu-type-k8", KNOWN=KNOWN)


@pytest.mark.parametrize("wanted", NAMES)
def test_a_request_is_served_by_its_own_type_and_a_family_by_its_members(wanted: str) -> None:
    served = {"A100": ["A100", "A100-40", "A100-80"]}.get(wanted, [wanted])
    assert [name for name in NAMES if matches(wanted, name)] == served


def test_cards_nobody_knows_match_by_name() -> None:
    assert matches("tesla_k80", "Tesla K80")
    assert not matches("Tesla K40", "Tesla K80")
    assert matches("volta big", "V100-32", OWN)
    assert not matches("V100", "V100-32", OWN)


def test_families_and_their_members_are_in_the_catalogue() -> None:
    assert FAMILIES == {"A100": ("A100-40", "A100-80")}


def test_fakes_are_numbered_per_type_and_indexed_over_all() -> None:
    assert parse_fake("H100:2, a10:1") == (
        Device(
            uuid="FAKE-H100-0",
            index=0,
            type="H100",
            memory_bytes=80 * GIB,
            kind=DeviceKind.FAKE,
            product="fake H100",
            pci="fa00:00:00",
        ),
        Device(
            uuid="FAKE-H100-1",
            index=1,
            type="H100",
            memory_bytes=80 * GIB,
            kind=DeviceKind.FAKE,
            product="fake H100",
            pci="fa00:01:00",
        ),
        Device(
            uuid="FAKE-A10-0",
            index=2,
            type="A10",
            memory_bytes=24 * GIB,
            kind=DeviceKind.FAKE,
            product="fake A10",
            pci="fa00:02:00",
        ),
    )


def test_fake_cpu_slots_are_fakes() -> None:
    assert parse_fake("CPU:1") == (
        Device(
            uuid="FAKE-CPU-0",
            index=0,
            type="CPU",
            memory_bytes=0,
            kind=DeviceKind.FAKE,
            product="fake CPU",
            pci="fa00:00:00",
        ),
    )


def test_own_types_can_be_faked() -> None:
    assert [(device.uuid, device.memory_bytes) for device in parse_fake("volta big:1", OWN)] == [
        ("FAKE-V100-32-0", 32 * GIB)
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' does not name a type and a count"),
        ("H100", "'H100' does not name a type and a count"),
        ("H100:4,", "'' does not name a type and a count"),
        (":4", "':4' does not name a type and a count"),
        ("H100:", "'' is not a count of 1 or more"),
        ("H100:0", "'0' is not a count of 1 or more"),
        ("H100:-1", "'-1' is not a count of 1 or more"),
        ("H100:two", "'two' is not a count of 1 or more"),
        ("H100:²", "'²' is not a count of 1 or more"),
        ("H100:٣", "'٣' is not a count of 1 or more"),
        ("H100:1234567890", "'1234567890' is not a count of 1 or more"),
        ("H100:4,h100:2", "H100 is named twice"),
        ("H100:1024,A10:1", "more than 1024 devices"),
    ],
)
def test_a_text_that_is_no_list_of_fakes_is_refused_with_an_example(text: str, why: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_fake(text)
    assert str(refused.value) == golden("model.hardware.serverless-gpu-fake", text=text, why=why, FAKE_HINT=FAKE_HINT)


def test_a_fake_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnknownGpuType) as refused:
        parse_fake("H101:8")
    assert str(refused.value) == golden("model.hardware.unknown-gpu-type-h101", KNOWN=KNOWN)


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(min_value=1, max_value=30)).filter(bool))
def test_fakes_round_trip(counts: dict[str, int]) -> None:
    devices = parse_fake(",".join(f"{name}:{count}" for name, count in counts.items()))
    types = [device.type for device in devices]
    assert {name: types.count(name) for name in dict.fromkeys(types)} == counts
    assert [device.index for device in devices] == list(range(len(devices)))
    assert len({device.uuid for device in devices}) == len(devices)


@given(st.text(alphabet="Hh10A:,-x ²", max_size=20))
def test_any_text_is_fakes_or_a_clear_refusal(text: str) -> None:
    try:
        devices = parse_fake(text)
    except InvalidValue as refused:
        assert refused.hint
    else:
        assert 1 <= len(devices) <= FAKE_DEVICES_MAX


def test_cpu_slots_behave_like_devices_without_memory() -> None:
    assert cpu_slots(2) == (
        Device(uuid="CPU-0", index=0, type="CPU", memory_bytes=0, kind=DeviceKind.CPU),
        Device(uuid="CPU-1", index=1, type="CPU", memory_bytes=0, kind=DeviceKind.CPU),
    )
    assert cpu_slots(0) == ()


@pytest.mark.parametrize("name", ["", " - _"])
def test_a_type_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        GpuType(name=name, memory_bytes=0)
    assert str(refused.value) == golden("model.hardware.gpu-type-cannot", name=name)


def test_a_type_with_negative_memory_is_refused() -> None:
    with pytest.raises(InvalidValue) as refused:
        GpuType(name="X1", memory_bytes=-1)
    assert str(refused.value) == golden("model.hardware.gpu-type-x1")


def test_fakes_are_there_instead_of_the_real_ones() -> None:
    assert census((*parse_fake("CPU:4,H100:2"), *cpu_slots(16))) == ({"CPU": 4, "H100": 2}, {})
    assert census(parse_fake("H100:2"), ["FAKE-H100-1", "gone"]) == ({"H100": 2}, {"H100": 1})


@pytest.mark.parametrize(
    ("types", "word"),
    [
        (["H100"], "GPU"),
        (["H100", "A10"], "GPU"),
        (["CPU"], "CPU slot"),
        (["CPU", "CPU"], "CPU slot"),
        (["CPU", "H100"], "device"),
        ([""], "device"),
        ([], "device"),
    ],
)
def test_23B9_time_is_gpu_time_only_where_all_devices_are_gpus(types: list[str], word: str) -> None:
    assert time_unit(types) == word
