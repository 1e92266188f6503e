"""Masking of secrets in output: no form of a value passes, however the output is split into reads."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shlex
import urllib.parse

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serverless_gpu.model import redaction
from serverless_gpu.model.redaction import Redactor

VALUE = 'hunter2/"it\'s" \\ ä+$x~'
BYTES = VALUE.encode()
ENCODED = {
    "raw": VALUE,
    "base64": base64.b64encode(BYTES).decode(),
    "base64 behind one byte": base64.b64encode(b":" + BYTES).decode(),
    "base64 behind two bytes": base64.b64encode(b"a:" + BYTES + b"!").decode(),
    "base64url": base64.urlsafe_b64encode(BYTES).decode(),
    "base64url without padding": base64.urlsafe_b64encode(BYTES).decode().rstrip("="),
    "hex": BYTES.hex(),
    "HEX": BYTES.hex().upper(),
    "query": urllib.parse.quote_plus(BYTES),
    "path": urllib.parse.quote(BYTES),
    "percent in small letters": urllib.parse.quote(BYTES, safe="").lower(),
    "json": json.dumps(VALUE),
    "json with letters": json.dumps(VALUE, ensure_ascii=False),
    "shell": shlex.quote(VALUE),
    "repr": repr(VALUE),
    "repr of bytes": repr(BYTES),
}
secrets = st.dictionaries(
    st.sampled_from(["A", "B", "C"]),
    st.one_of(st.binary(min_size=8, max_size=40), st.text("ab", min_size=8).map(str.encode)),
    min_size=1,
)


def masked(redactor: Redactor, *pieces: bytes) -> bytes:
    stream = redactor.stream()
    return b"".join([*(stream.feed(piece) for piece in pieces), stream.end()])


@pytest.mark.parametrize("encoding", ENCODED)
def test_27_each_encoding_of_a_value_is_masked_and_counted(encoding: str) -> None:
    redactor = Redactor({"TOKEN": BYTES + b"\n"})
    text = redactor.text(f"before {ENCODED[encoding]} after")
    assert "[secret TOKEN]" in text and text.startswith("before ") and text.endswith(" after")
    assert redactor.counts == {"TOKEN": 1}
    rest = text.replace("[secret TOKEN]", "").removeprefix("before ").removesuffix(" after")
    assert len(rest) <= 6, f"only quotation marks and characters with bits of neighbours are left: {rest}"


def test_what_bash_prints_is_masked() -> None:
    redactor = Redactor({"A": b'hunter2/"it\'s" \\ +$x~'})
    assert redactor.text("+ : 'hunter2/\"it'\\''s\" \\ +$x~'") == "+ : '[secret A]'"
    assert redactor.text('hunter2/\\"it\\\'s\\"\\ \\\\\\ +\\$x~') == "[secret A]"


@given(secrets=secrets, data=st.data())
def test_27_no_split_of_the_output_changes_what_is_masked(secrets: dict[str, bytes], data: st.DataObject) -> None:
    values = st.sampled_from(
        [form for value in secrets.values() for form in redaction.forms(value.strip() or b"-" * 8)]
    )
    parts = data.draw(st.lists(st.one_of(values, values.map(lambda form: form[:-1]), st.binary(max_size=9))))
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, split = Redactor(secrets), Redactor(secrets)
    found = masked(whole, text)
    assert masked(split, *pieces) == found and split.counts == whole.counts
    assert masked(Redactor(secrets), *(bytes([byte]) for byte in text)) == found
    assert len(whole.filled(text)) == len(text)


@given(value=st.binary(min_size=8, max_size=60).filter(lambda value: len(value.strip(b" \t\r\n")) >= 8), data=st.data())
@example(value=b"aaaaaaaaab", data=None)
def test_27_a_complete_value_never_passes(value: bytes, data: st.DataObject | None) -> None:
    core = value.strip(b" \t\r\n")
    for form in redaction.forms(core):
        cut = data.draw(st.integers(0, len(form))) if data is not None else 3
        out = masked(Redactor({"A": value}), b"<<" + form[:cut], form[cut:] + b">>")
        assert form not in out.replace(b"[secret A]", b"\0")


def test_a_line_is_not_held_back_but_a_beginning_of_a_value_is() -> None:
    stream = Redactor({"A": b"hunter2-hunter2"}).stream()
    assert stream.feed(b"step 1\n") == b"step 1\n"
    assert stream.feed(b"password: hunt") == b"password: "
    assert stream.feed(b"ing\n") == b"hunting\n"
    assert stream.feed(b"hunter2-hunt") == b""
    assert stream.end() == b"hunter2-hunt"


def test_the_longest_value_at_a_position_counts() -> None:
    redactor = Redactor({"SHORT": b"password1", "LONG": b"password1-and-more"})
    assert masked(redactor, b"password1-and", b"-more password1-and") == b"[secret LONG] [secret SHORT]-and"
    assert redactor.counts == {"LONG": 1, "SHORT": 1}


def test_short_values_are_named_and_not_masked() -> None:
    redactor = Redactor({"PIN": b"1234567\n", "TOKEN": b"12345678"})
    assert redactor.unmasked == ("PIN",)
    assert redactor.text("1234567 12345678") == "1234567 [secret TOKEN]"


def test_a_large_value_is_masked_whole_and_its_encodings_in_their_first_part() -> None:
    value = bytes(range(33, 127)) * 600
    redactor = Redactor({"A": value})
    assert masked(redactor, value[:30_000], value[30_000:]) == b"[secret A]"
    text = base64.b64encode(value)
    out = masked(redactor, text)
    assert out.startswith(b"[secret A]") and len(text) - len(out) > redaction.ENCODED_BYTES_MAX


def test_a_filled_pickle_loads_and_has_no_value() -> None:
    redactor = Redactor({"A": b"hunter2-hunter2"})
    data = pickle.dumps(ValueError("bad token hunter2-hunter2", {"k": b"hunter2-hunter2"}))
    error = pickle.load(io.BytesIO(redactor.filled(data)))
    assert error.args == ("bad token ***************", {"k": b"***************"}) and redactor.counts == {"A": 2}


def test_all_texts_of_a_json_value_are_masked() -> None:
    redactor = Redactor({"A": b'say "hi"'})
    value = {"message": 'no: say "hi"', "notes": ['say "hi"'], "code": 1, "none": None}
    assert redactor.value(value) == {"message": "no: [secret A]", "notes": ["[secret A]"], "code": 1, "none": None}


def test_text_with_bytes_that_are_no_text_keeps_them() -> None:
    redactor = Redactor({"A": b"\xff\xfehunter2"})
    assert redactor.text("x\udcff\udcfehunter2 \udcff") == "x[secret A] \udcff"
    assert redactor.text("\ud800 hunter2") == "\ud800 hunter2"
