"""Appends one attempt's samples on one node to a file, without waiting.

    sample, 1 s ─▶ TelemetryFile ─ mean of the interval ─▶ logs/<node rank>.telemetry ─▶ delivery, Run.metrics(), server

The interval between telemetry rows grows with the run's duration.

Failure cases: If the disk is full or the directory is missing, the writer drops and counts the row. If a writer was
killed within a line, the next writer ends the line, and readers skip the incomplete line. If the wall clock moves back,
the writer appends a row immediately.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serverless_gpu.model.telemetry import (
    SECOND_NS,
    DeviceTotals,
    Header,
    HostSample,
    Sample,
    add,
    encode,
    interval_ns,
    merged,
)
from serverless_gpu.tracking.metric_points import SampleReader

_EARLY_NS = SECOND_NS // 2  # Tolerance for samples that arrive early, because the sampler's interval is not exact.


class TelemetryFile:
    """Writes a telemetry file, or continues an earlier monitor's file."""

    def __init__(self, path: Path, header: Header) -> None:
        self.rows = 0  # Number of rows in the telemetry file.
        self.lost = 0  # Number of rows that the writer could not write.
        self.uses: dict[str, DeviceTotals] = {}  # Totals of the samples by device.
        self._path = path
        self._header = header
        self._headed = False
        self._torn = False
        self._pending: list[Sample] = []
        self._last: Sample | None = None
        self._network: tuple[int, int] | None = None
        self._take_up()

    @property
    def header(self) -> Header:
        """Return the current description of the sampled devices."""
        return self._header

    def describe(self, header: Header) -> None:
        """Set the device description for the following samples."""
        if header != self._header:
            self.flush()
            self._header, self._headed = header, False

    def append(self, sample: Sample) -> bool:
        """Add a sample. Return True if `append` wrote a row.

        Later in a run, each row combines several samples.
        """
        self._pending.append(self._counted(sample))
        self.uses = add(self.uses, self._header, sample)
        if self._last is not None:
            since_ns = sample.at_ns - self._last.at_ns
            if 0 <= since_ns < interval_ns(self.rows) - _EARLY_NS:
                return False
        return self.flush()

    def flush(self) -> bool:
        """Write the samples collected since the last row. Return True if the method wrote any samples."""
        if not self._pending:
            return False
        row = merged(self._pending)
        self._pending.clear()
        self._last = row
        head = b"" if self._headed else encode(self._header)
        if not self._write((b"\n" if self._torn else b"") + head + encode(row)):
            self.lost += 1
            return False
        self._headed = True
        self.rows += 1
        return True

    def _write(self, data: bytes) -> bool:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        written = 0
        try:
            written = os.write(fd, data)
        except OSError:
            pass
        finally:
            os.close(fd)
        if written:
            self._torn = written < len(data)
        return written == len(data)

    def _take_up(self) -> None:
        """Read the state of an earlier monitor's file: row count, last sample, incomplete line."""
        samples = SampleReader(self._path)
        while True:
            before = samples.offset
            for header, sample in samples.read():
                self.rows += 1
                self._last = sample
                self._headed = header == self._header
                self.uses = add(self.uses, header, sample)
            if samples.offset == before:
                break
        self._torn = samples.backlog > 0

    def _counted(self, sample: Sample) -> Sample:
        """Return the sample with network traffic counted from the file's first sample."""
        host = sample.host
        if host.network_receive_bytes is None or host.network_transmit_bytes is None:
            return sample
        if self._network is None:
            before = HostSample() if self._last is None else self._last.host
            self._network = (
                host.network_receive_bytes - (before.network_receive_bytes or 0),
                host.network_transmit_bytes - (before.network_transmit_bytes or 0),
            )
        counted = msgspec.structs.replace(
            host,
            network_receive_bytes=max(0, host.network_receive_bytes - self._network[0]),
            network_transmit_bytes=max(0, host.network_transmit_bytes - self._network[1]),
        )
        return msgspec.structs.replace(sample, host=counted)
