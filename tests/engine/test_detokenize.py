"""Text in pieces equals text at once, and ends before a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spanflow.engine.detokenize import TextStream


def decode(ids: list[int]) -> str:
    """Ids are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(decode, stop)
    found = []
    for byte in text.encode():
        found.append(stream.push(byte))
        if stream.stopped:
            break
    return [*found, stream.finish()], stream.stopped


@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text: str) -> None:
    assert "".join(pieces(text)[0]) == text


@given(st.text(alphabet="abé", max_size=40), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_stop_string_met_first(text: str, stop: list[str]) -> None:
    found, stopped = pieces(text, tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stopped == bool(ends)
    if stopped:
        seen = text[: min(ends)]
        wanted = seen[: min(seen.find(s) for s in stop if s in seen)]
        assert "".join(found) == wanted
    else:
        assert "".join(found) == text


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ("STOP",))
    assert [stream.push(b) for b in b"aSTO"] == ["a", "", "", ""]
    assert stream.push(ord("B")) == "STOB"
    assert [stream.push(b) for b in b"ST"] == ["", ""]
    assert stream.finish() == "ST"


def test_a_character_of_several_tokens_comes_whole_and_an_unfinished_one_at_the_end() -> None:
    stream = TextStream(decode)
    assert [stream.push(b) for b in "ñ".encode()] == ["", "ñ"]
    assert stream.push("ñ".encode()[0]) == ""
    assert stream.finish() == "\ufffd"
