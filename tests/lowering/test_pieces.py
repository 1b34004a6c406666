"""Pieces of text to ids, on tokenizers of several kinds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from lowering.conftest import Model
from lowering.tiny import TinyTokenizer
from lowering.trees import MARKED, PLAIN

from spanflow.lowering.pieces import PieceTokenizer, Run, num_shared


class SpacedTokenizer(TinyTokenizer):
    """Puts a space before whatever it tokenises, as many SentencePiece models do."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(" " + text, add_special_tokens)


def test_a_space_that_the_tokenizer_adds_stands_only_before_the_prompt() -> None:
    tokenizer = SpacedTokenizer("x", ["<x>"])
    pieces = PieceTokenizer(tokenizer)
    assert tokenizer.decode(pieces.encode_first("ab")) == " ab"
    for text in ("ab", " ab", "\nab", "\n\n", ".", "a", "", "ab\n", "<x>", "<x>b"):
        assert tokenizer.decode(pieces.encode_inner(text)) == text


def test_no_guard_where_none_is_needed(chatml: Model) -> None:
    pieces = chatml.template.pieces
    for text in ("ab", " ab", "\nab", "\n\n"):
        assert pieces.encode_inner(text) == chatml.ids(text)


def test_a_sentencepiece_like_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], initial_alphabet=["\n", "."], show_progress=False
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog.\n"] * 4, trainer)

    class Tokenizer:
        def get_added_vocab(self) -> dict[str, int]:
            return {"<s>": 1}

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(made.encode(text, add_special_tokens=add_special_tokens).ids)

    pieces = PieceTokenizer(Tokenizer())
    assert made.decode(pieces.encode_first("the fox"), skip_special_tokens=False) == " the fox"
    for text in ("the fox", " the fox", "the fox\n", "\nthe", "."):
        assert made.decode(pieces.encode_inner(text), skip_special_tokens=False) == text
    encoded = pieces.encode([Run("<s>", False), Run("fox <s> dog", True)], is_first=True, where="$")
    assert encoded.token_ids.count(1) == 1


@settings(max_examples=20, deadline=None)
@given(left=PLAIN | MARKED, right=PLAIN | MARKED)
def test_tokens_that_a_cut_changes(chatml: Model, left: str, right: str) -> None:
    number = chatml.template.pieces.num_differing(left, right)
    apart, joint = chatml.ids(left) + chatml.ids(right), chatml.ids(left + right)
    assert (number == 0) == (apart == joint)
    assert number <= max(len(apart), len(joint))


def test_cuts_are_compared_near_the_cut_only(chatml: Model) -> None:
    pieces = chatml.template.pieces
    assert pieces.num_differing("a b " * 1000, "y" + " c d" * 1000) == pieces.num_differing("b ", "y") > 0


def test_markers_are_found_where_they_overlap() -> None:
    pieces = PieceTokenizer(TinyTokenizer("x", ["<a>", "<a><b>", "><", "b"]))
    assert list(pieces.find_markers("<a><b>")) == [(0, "<a><b>"), (2, "><"), (4, "b")]
    assert list(PieceTokenizer(TinyTokenizer("x", [])).find_markers("<a>")) == []


@pytest.mark.parametrize(("one", "other", "number"), [("", "a", 0), ("ab", "ab", 2), ("abc", "abd", 2), ("x", "y", 0)])
def test_num_shared(one: str, other: str, number: int) -> None:
    assert num_shared(one, other) == num_shared(other, one) == number
