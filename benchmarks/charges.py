"""How long the ledger takes to charge a million facts, on one core: from facts as they are stored to its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.report import Row, Timing
from serverless_gpu.model.facts import Fact, FactKind
from serverless_gpu.model.ledger import Entry, lines, post
from serverless_gpu.model.pricing import Tariff

_FACTS, _FACTS_QUICK = 1_000_000, 100_000
_BAR_PER_MINUTE = 1_000_000
_S = 1_000_000_000
_MIDNIGHT_NS = 20_000 * 86_400 * _S
_ALIVE = 42  # with the other 8, 50 facts for an attempt: three quarters of an hour
_TARIFF = Tariff(gpu_micros_per_hour=2_990_000, core_micros_per_hour=40_000, memory_micros_per_hour=5_000)
_decode = msgspec.json.Decoder(Fact).decode


def stored_facts(run_id: str, number: int) -> list[bytes]:
    """Return the facts of one attempt as the database has them; one in sixteen of them goes on over midnight."""
    kinds = ("reserved", "hydrating", "starting", "exec", *(["alive"] * _ALIVE), "stopping", "exited", "freed")
    seconds = (0, 0, 2, 3, *(3 + 60 * (turn + 1) for turn in range(_ALIVE)), 2540, 2541, 2541)
    at_ns = number % 24 * 3_600 * _S + 2_700 * _S * (number // 24 % 2)
    return [
        msgspec.json.encode(
            Fact(
                attempt=f"{run_id}:1",
                seq=seq,
                kind=FactKind(kind),
                boot_id="4f3c9a52-6c1e-4b57-9a57-2f8d2f0f6f11",
                boottime_ns=10**15 + at_ns + second * _S + 123_456_789,
                wall_ns=_MIDNIGHT_NS + at_ns + second * _S + 123_456_789,
                gpus=tuple(f"GPU-8e6a2e5c-1b7d-4c5f-9f0a-{number:06}{device:06}" for device in range(8)),
                cpus=64,
                memory_bytes=512 << 30,
                grace_ms=30_000 if kind == "stopping" else None,
            )
        )
        for seq, (kind, second) in enumerate(zip(kinds, seconds, strict=True))
    ]


def ledger(quick: bool) -> Row:
    """Charge attempts of 8 GPUs, cores and memory, from the text of their facts to the ledger's entries."""
    count = _FACTS_QUICK if quick else _FACTS
    attempts = [stored_facts(f"r{number:06}", number) for number in range(count // len(stored_facts("r", 0)))]
    facts = sum(map(len, attempts))
    ours: list[float] = []
    reading: list[float] = []
    for _ in range(1 if quick else 3):
        ours.append(_took_ms(attempts, _charged))
        reading.append(_took_ms(attempts, _read))
    per_minute = facts * 60_000 / sorted(ours)[len(ours) // 2]
    return Row(
        name=f"the ledger's entries of {facts:,} facts, one core, without a database",
        ours=Timing("facts → entries", tuple(ours)),
        against=(Timing("only reading the facts' JSON", tuple(reading)),),
        bar=f"≥ {_BAR_PER_MINUTE:,} facts per minute",
        met=per_minute >= _BAR_PER_MINUTE,
        value=f"{per_minute:,.0f} per minute, {per_minute / _BAR_PER_MINUTE:.1f}× the bar",
    )


def _charged(texts: Sequence[bytes]) -> int:
    posted: tuple[Entry, ...] = ()
    return len(post(posted, lines(map(_decode, texts), _TARIFF), final=True))


def _read(texts: Sequence[bytes]) -> int:
    return len([_decode(text) for text in texts])


def _took_ms(attempts: Sequence[Sequence[bytes]], step: Callable[[Sequence[bytes]], int]) -> float:
    began = time.perf_counter()
    for texts in attempts:
        step(texts)
    return 1000 * (time.perf_counter() - began)


ROWS: dict[str, Callable[[bool], Row]] = {"ledger": ledger}
