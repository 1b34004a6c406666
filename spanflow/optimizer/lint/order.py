"""Checks of texts that depend on an order which a commute does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spanflow.optimizer.lint.finding import Found, Limits
from spanflow.optimizer.lint.reading import Group, Operand, Reading, Said

#: A longer text may well speak of a place in itself.
_MAX_SHORT = 400
_MAX_STEP = 120
_MAX_QUESTION = 300

#: What operands are called, and what words about them call them.
_PIECE = r"(?:documents?|docs?|passages?|sources?|snippets?|excerpts?|chunks?|candidates?|answers?|options?)"
_ANY_PIECE = rf"(?:{_PIECE}|responses?|choices?|solutions?|drafts?|proposals?|results?)"
_ORDINAL = r"(?:first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last)"
_NUMBER = r"(?:\d{1,3}|(?-i:[A-H]))"
_COUNTED = (
    rf"\b(?:document|doc|passage|source|snippet|excerpt|chunk|candidate|option)\s+#?{_NUMBER}(?![\w'’%])"
    # One can answer 70 questions, and a question.
    rf"|\banswer\s+#?{_NUMBER}(?=\s*(?:[,;:!?)\]]|\.(?!\d)|$|is\b|was\b|and\b|or\b))"
)

_LABEL = re.compile(
    rf"\s*[\[(#*]*\s*(?:{_ANY_PIECE}|rank|no\.|number|item)\s*[:#]?\s*({_NUMBER})\s*[\]):.*\n—–-]", re.I
)
_INDEX = re.compile(r"\s*(?:\[(\d{1,3}|[A-H])\]|\((\d{1,3}|[A-H])\)|#(\d{1,3})\b)")
_COUNT = re.compile(r"\s*(\d{1,3}|[A-H])[.):]\s")
_STEP = re.compile(r"\s*(?:first|second|third|next|then|last|final)(?:ly)?\s*[,:]", re.I)
_POINTER = re.compile(
    rf"\bthe\s+(?:{_ORDINAL}|previous|preceding|above)\s+(?:\w+\s+)?{_PIECE}\b|\b{_PIECE}\s+(?:above|below)\b|{_COUNTED}"
    r"|\b(?:see|as|mentioned|described|shown|stated|noted|listed|quoted|said|told|explained|discussed|written|given)"
    r"\s+(?:above|below|earlier)\b"
    r"|\bthe\s+above\s+(?:text|paragraph|section|list|table|quote|question)s?\b"
    r"|\bthe\s+(?:previous|preceding|above)\s+ones?\b|\bthe\s+ones?\s+(?:above|below|before)\b"
    r"|\b(?:read|do|use|take|consider|answer|check)\s+(?:this|it|these|them)\s+(?:first|last|next)\b"
    r"|\bthe\s+above\b(?=\s*(?:[.,;:!?)]|$|is\b|was\b|are\b|were\b))",
    re.I,
)
_RANK = re.compile(rf"\bthe\s+{_ORDINAL}\s+(?:\w+\s+)?{_ANY_PIECE}\b|{_COUNTED}", re.I)
_ASKS_NUMBER = re.compile(
    r"\b(?:number|index|letter|position|rank)\s+of\s+(?:the|your|each|every)\s+(?:\w+\s+){0,3}(?:document|doc|passage|source"
    r"|snippet|excerpt|chunk|candidate|answer|option|response|choice|solution|draft|proposal|result)\b"
    # 'with the number of apples' counts something else.
    r"|\bwith\s+(?:only\s+)?(?:its|their)\s+(?:number|index|letter|position)\b|\bwith\s+(?:only\s+)?the\s+(?:index|letter)\b",
    re.I,
)
_ASKING = re.compile(r"\s*(?:question|q|query|task|instructions?)\s*[:.]\s", re.I)


def refers_to_order(reading: Reading, limits: Limits) -> Iterator[Found]:
    """An operand of a commute that says its place, or points at another operand."""
    for _, texts in _groups(reading):
        labels = {said.operand: found for said in texts if (found := _index_of(said))}
        # One text that begins with a number may be a chapter; two with different numbers are ranks.
        are_ranks = len(set(labels.values())) > 1
        first_of: dict[Operand | None, Said] = {}
        for said in texts:
            is_first = first_of.setdefault(said.operand, said) is said
            found = _said_place(said, is_first, are_ranks)
            if found is None:
                continue
            yield (
                said.place,
                f"{found!r} speaks of an order, and the operands of its commute may stand in any",
                "leave it out, name operands by what they are (a title, an id), or join them with seq",
            )


def _said_place(said: Said, is_first: bool, are_ranks: bool) -> str | None:
    """The words with which a text says its place, or points at another."""
    text = said.text
    found = None
    if is_first and (are_ranks or not said.is_fragment):
        found = _LABEL.match(text) or (_INDEX.match(text) if are_ranks else None)
    # Pieces of a corpus begin with the numbers of chapters, and speak of places in what they were cut from.
    if found is None and not said.is_fragment and len(text) <= _MAX_SHORT:
        if is_first:
            found = (_COUNT.match(text) if are_ranks else None) or (
                _STEP.match(text) if len(text) <= _MAX_STEP else None
            )
        found = found or _POINTER.search(text)
    return found[0].strip() if found else None


def _index_of(said: Said) -> str | None:
    """The number or letter that a text begins with."""
    found = _LABEL.match(said.text) or _INDEX.match(said.text) or (not said.is_fragment and _COUNT.match(said.text))
    return next(filter(None, found.groups()), None) if found else None


def asks_for_rank(reading: Reading, limits: Limits) -> Iterator[Found]:
    """Words beside a commute that name one of its operands by its place, or ask for its number."""
    for group, texts in _groups(reading):
        labelled = {said.operand for said in texts if _index_of(said)}
        if group.num_operands < 2 or labelled >= set(group.operands):
            continue
        for said in reading.texts:
            if said.group is not None or said.is_fragment or said.role == "assistant":
                continue
            if found := _RANK.search(said.text) or _ASKS_NUMBER.search(said.text):
                yield (
                    said.place,
                    f"{found[0]!r} counts the operands of a commute, which may stand in any order",
                    "ask for the operand itself, or for something that is said in it (a title, an id), or join them "
                    "with seq",
                )
        return  # once for all commutes of this prompt


def holds_question(reading: Reading, limits: Limits) -> Iterator[Found]:
    """The question as an operand of the commute that it asks about."""
    parts = list(enumerate(reading.parts))
    last_of = {part.group: i for i, part in parts}
    last_asked = max((i for i, part in parts if isinstance(part, Said) and part.role == "user"), default=-1)
    for group, texts in _groups(reading):
        if len(group.operands) < 2:
            continue
        own = [said for said in texts if said.text.strip()]
        questions = [said for said in own if _is_question(said)]
        if len({said.operand for said in questions}) != 1:
            continue
        question = questions[0]
        if len([said for said in own if said.operand == question.operand]) > 1:
            continue
        if last_asked > last_of[group] and not _ASKING.match(question.text):
            continue
        yield (
            question.place if question.operand is None else question.operand.place,
            "it reads like a question about the other operands of its commute, and operands do not see each other",
            "put it behind the commute, as in seq(commute(*documents), user(question))",
        )


def _is_question(said: Said) -> bool:
    text = said.text.strip()
    if said.is_fragment or said.role != "user" or len(text) > _MAX_QUESTION:
        return False
    return text.endswith(("?", "？")) or _ASKING.match(text) is not None


def _groups(reading: Reading) -> Iterator[tuple[Group, list[Said]]]:
    """Each commute with its texts."""
    texts: dict[Group, list[Said]] = {group: [] for group in reading.groups}
    for said in reading.texts:
        if said.group is not None:
            texts[said.group].append(said)
    yield from texts.items()
