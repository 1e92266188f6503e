"""What the driver's log says of GPUs, and what it means: F23 to F25 of the failure matrix, as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model import xid
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.xid import ENDS_A_RUN, QUARANTINES, UserFault, XidEvent, XidKind

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            XidEvent(pci="0000:17:00", number=79, text="pid='<unknown>', name=<unknown>, GPU has fallen off the bus"),
        ),
        (
            "NVRM: Xid (PCI:0000:C1:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault",
            XidEvent(pci="0000:c1:00", number=31, text="pid=4711, name=python, Ch 00000008, MMU Fault"),
        ),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, Contained", XidEvent(pci="0000:3b:00", number=94, text="Contained")),
        ("NVRM: Xid (PCI:00000001:3b:00): 48", XidEvent(pci="0001:3b:00", number=48)),
        ("NVRM: GPU at PCI:0000:17:00: GPU-8c1f", None),
        ("nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 20034, Fatal", None),
        ("somebody wrote NVRM: Xid and nothing else", None),
        ("[  123.4] NVRM: Xid (PCI:0000:C1:00): 79, GPU has fallen off the bus.", None),
        ("overlayfs: upper fs missing /tmp/NVRM: Xid (PCI:0000:17:00): 79, pid=1", None),
        (" NVRM: Xid (PCI:0000:17:00): 79, pid=1", None),
        ("", None),
    ],
)
def test_a_line_of_the_kernels_log_is_read(line: str, said: XidEvent | None) -> None:
    assert xid.read(line) == said


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79),
        ("NVRM: Xid (PCI:0000:17:00): 48, pid=1234, name=python3, An uncorrectable double bit error (DBE)", 48),
        ("NVRM: Xid (PCI:0000:17:00): 31, pid=2345, name=pt_main_thread, Ch 0000000a, intr 10000000. MMU Fault", 31),
        ("NVRM: Xid (PCI:0000:17:00 GPU-I:03): 94, pid=77, name=python, Contained: SM (0x1). RST: No, D-RST: No", 94),
        ("NVRM: Xid (PCI:0000:17:00): 119, pid=9, name=nvidia-smi, Timeout after 6s of waiting for RPC response", 119),
        ("NVRM: Xid (PCI:0000:17:00): 13, Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): Illegal Instruction", 13),
    ],
)
def test_22A10_lines_of_real_drivers_are_still_read(line: str, number: int) -> None:
    said = xid.read(line)
    assert said is not None and (said.pci, said.number) == ("0000:17:00", number)


@given(st.text(min_size=1))
def test_22A10_an_xid_inside_another_message_is_none(before: str) -> None:
    assert xid.read(f"{before}NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.") is None


@given(st.text())
def test_no_line_is_too_strange(line: str) -> None:
    said = xid.read(f"NVRM: Xid (PCI:0000:17:00): 79, {line}")
    assert said is not None and said.number == 79
    assert len(said.text) <= 200 and said.text.isprintable()
    xid.read(line)


@pytest.mark.parametrize(
    ("text", "pci"),
    [
        ("00000000:17:00.0", "0000:17:00"),
        ("0000:17:00", "0000:17:00"),
        ("0000FF01:AB:1F.0", "ff01:ab:1f"),
        ("17:00.0", ""),
        ("", ""),
    ],
)
def test_addresses_of_nvml_and_of_the_kernel_are_the_same(text: str, pci: str) -> None:
    assert xid.address(text) == pci


def test_fakes_have_addresses_of_their_own() -> None:
    devices = parse_fake("H100:1000,A10:3")
    assert len({device.pci for device in devices}) == 1003
    assert all(xid.address(device.pci) == device.pci for device in devices)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (79, XidKind.LOST),
        (48, XidKind.UNCORRECTABLE),
        (95, XidKind.UNCORRECTABLE),
        (94, XidKind.CONTAINED),
        (63, XidKind.PENDING),
        (13, XidKind.USER),
        (31, XidKind.USER),
        (43, XidKind.USER),
        (45, XidKind.OTHER),
        (9999, XidKind.OTHER),
    ],
)
def test_F23_F24_F25_what_follows_from_a_number(number: int, kind: XidKind) -> None:
    fault = xid.fault(XidEvent(pci="0000:17:00", number=number, text="so the driver says"), "GPU-1", {})
    assert fault.kind is kind
    assert fault.sentence.startswith(f"GPU-1: Xid {number}, ")
    assert xid.fault(XidEvent(pci="", number=number), "GPU-1", {number: XidKind.LOST}).kind is XidKind.LOST


def test_what_ends_a_run_and_what_keeps_a_gpu_from_being_lent() -> None:
    assert XidKind.CONTAINED in ENDS_A_RUN and XidKind.CONTAINED not in QUARANTINES
    assert XidKind.PENDING in QUARANTINES and XidKind.PENDING not in ENDS_A_RUN
    assert not {XidKind.USER, XidKind.OTHER} & (ENDS_A_RUN | QUARANTINES)


def hits(*principals: str, at_ns: int = 0) -> list[UserFault]:
    return [UserFault(principal=name, number=31, at_ns=at_ns) for name in principals]


def test_F25_four_principals_within_a_day_make_a_gpu_suspect() -> None:
    assert xid.suspicion(hits("a", "b", "c") * 5, HOUR_NS) == ""
    assert "4 principals" in xid.suspicion(hits("a", "b", "c", "d"), HOUR_NS)
    assert xid.suspicion([*hits("a"), *hits("b", "c", "d", at_ns=20 * HOUR_NS)], 25 * HOUR_NS) == ""
    assert xid.suspicion(hits("a", "b", "c", "d", at_ns=30 * HOUR_NS), HOUR_NS) == "", "a clock that was set back"
