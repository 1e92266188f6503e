"""Secrets in failures, which are masked, and in results, which are counted only."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import RankFailed
from serverless_gpu.model.redaction import Redactor
from serverless_gpu.node.supervisor import outcome_redaction
from serverless_gpu.node.supervisor.outcome_redaction import mask_failure, result_notes, unmasked_notes
from tests.support.golden import golden
from tests.support.node.gang import Line

VALUE = b"hunter2-hunter2"


@pytest.fixture
def redactor() -> Redactor:
    return Redactor({"TOKEN": VALUE})


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    for name in ("failures", "results"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_27_the_text_and_the_pickle_of_a_failure_are_masked(attempt: Path, redactor: Redactor) -> None:
    record = {"message": f"bad {VALUE.decode()}", "notes": [VALUE.decode()], "rank": 0}
    (attempt / "failures" / "0.json").write_text(json.dumps(record))
    (attempt / "failures" / "0.pkl").write_bytes(pickle.dumps(ValueError(VALUE)))
    assert mask_failure(attempt, 0, redactor) == []
    found = json.loads((attempt / "failures" / "0.json").read_text())
    assert found == {"message": "bad [secret TOKEN]", "notes": ["[secret TOKEN]"], "rank": 0}
    assert pickle.loads((attempt / "failures" / "0.pkl").read_bytes()).args == (b"*" * len(VALUE),)
    assert redactor.counts == {"TOKEN": 3}


def test_a_failure_without_a_secret_stays_the_same_file(attempt: Path, redactor: Redactor) -> None:
    for name, data in (("0.json", b'{"message":  "m"}'), ("0.pkl", b"pickle")):
        (attempt / "failures" / name).write_bytes(data)
    before = [path.stat().st_ino for path in sorted((attempt / "failures").iterdir())]
    assert mask_failure(attempt, 0, redactor) == [] == mask_failure(attempt, 1, redactor)
    assert [path.stat().st_ino for path in sorted((attempt / "failures").iterdir())] == before


def test_a_link_or_a_broken_file_in_place_of_a_failure_is_reported_and_not_followed(
    attempt: Path, redactor: Redactor, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(VALUE)
    (attempt / "failures" / "0.pkl").symlink_to(tmp_path / "other")
    (attempt / "failures" / "0.json").write_bytes(VALUE)
    assert [note.partition(": ")[0] for note in mask_failure(attempt, 0, redactor)] == [
        "secrets in failures/0.json are not masked",
        "secrets in failures/0.pkl are not masked",
    ]
    assert (tmp_path / "other").read_bytes() == VALUE


def test_27_results_are_counted_and_stay_as_they_are(
    attempt: Path, redactor: Redactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"x" * 30 + VALUE + VALUE.hex().encode()
    (attempt / "results" / "0.pkl").write_bytes(data)
    (attempt / "results" / "2.pkl").write_bytes(b"nothing")
    monkeypatch.setattr(outcome_redaction, "_CHUNK_BYTES", 7)
    assert result_notes(attempt, range(3), redactor) == [golden("node.redaction.result-contains")]
    assert (attempt / "results" / "0.pkl").read_bytes() == data and redactor.counts == {}


def test_a_large_result_is_searched_at_its_beginning_only(
    attempt: Path, redactor: Redactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_redaction, "SEARCHED_BYTES_MAX", 1 << 20)
    (attempt / "results" / "0.pkl").write_bytes(bytes(1 << 20) + VALUE)
    (attempt / "results" / "1.pkl").write_bytes(VALUE)
    assert result_notes(attempt, range(2), redactor) == [golden("node.redaction.searched-only", size="1.0 MB")]


def test_a_short_secret_is_named_in_the_receipt() -> None:
    assert unmasked_notes(Redactor({"PIN": b"1234", "TOKEN": VALUE})) == [golden("node.redaction.too-short")]
    assert unmasked_notes(Redactor({"TOKEN": VALUE})) == []


def test_27_a_failure_is_told_without_its_secret(tmp_path: Path, redactor: Redactor) -> None:
    line = Line(tmp_path)
    try:
        line.gang.redactor = redactor
        (tmp_path / "failures").mkdir()
        os.mkfifo(tmp_path / "failures" / "0.pkl")
        [event] = line.hear(
            event="failed", failure={"kind": "exception", "type": "E", "message": f"no {VALUE.decode()}"}
        )
        assert isinstance(event, RankFailed) and event.failure.detail == "E: no [secret TOKEN]"
        line.hear(event="say", text=f"note {VALUE.decode()}", note=True)
        assert line.said == ["note [secret TOKEN]"] == line.account.notes[-1:]
        assert len(line.account.notes) == 2 and redactor.counts == {"TOKEN": 1}
    finally:
        line.rank.close()
        line.gang.close()
