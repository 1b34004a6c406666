"""A conversation as its chat template writes it, taken apart into the template's text and what the turns say.

The place of a message is found by rendering a random word in its stead, never by searching for something that a text
could contain; then the real messages are rendered too, and what was taken apart must add up to the same text.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from spanflow.errors import QueryError
from spanflow.ir.nodes import Role
from spanflow.lowering.conversation import Chunk, Turn
from spanflow.lowering.template import NONCE, ChatTemplate


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a turn's content in the rendered text.

    `cut_front` and `cut_back` count the characters of white space that the template trims; `rewritten` is the
    content where the template made something else of it, with answers as their nonces.
    """

    turn: int
    cut_front: int = 0
    cut_back: int = 0
    rewritten: str | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """The template's texts, one more than slots, around the slots in the order in which they are rendered.

    `answers` maps the nonces that stand for generated answers to them. `whole` is the rendered text where it could
    not be taken apart (then there are no slots); `why` says so.
    """

    structure: tuple[str, ...]
    slots: tuple[Slot, ...]
    answers: Mapping[str, Chunk]
    whole: str | None = None
    why: str = ""
    notes: tuple[str, ...] = ()

    def split_answers(self, text: str) -> list[str | Chunk]:
        """The text cut at the nonces of answers, with the answers in their places."""
        return [self.answers.get(part, part) for part in _split(text, self.answers) if part]


def take_apart(template: ChatTemplate, turns: Sequence[Turn], path: str) -> Rendering:
    """Render the turns, and find the place of each. Raises QueryError where the template refuses them."""
    texts = [chunk.text for turn in turns for chunk in turn.chunks]
    said = [chunk for turn in turns for chunk in turn.chunks if chunk.answer is not None]
    nonces = template.nonces(len(turns) + len(said), texts)
    answers = dict(zip(nonces[len(turns) :], said, strict=True))
    names = {id(chunk): nonce for nonce, chunk in answers.items()}
    contents = ["".join(names.get(id(chunk), chunk.text) for chunk in turn.chunks) for turn in turns]
    parting = _Parting(template, [turn.role for turn in turns], contents, nonces[: len(turns)], path)
    try:
        rendering = parting.run()
    except QueryError:  # the real messages render, others do not
        rendering = parting.give_up("it refuses other words in these messages")
    return replace(rendering, answers=answers, notes=_note_answers(parting, answers))


def _note_answers(parting: _Parting, answers: Mapping[str, Chunk]) -> tuple[str, ...]:
    """Say so where the template would write a generated answer in another way than it was sampled."""
    if not answers:
        return ()
    spoken = {nonce: chunk.answer.text.strip() for nonce, chunk in answers.items() if chunk.answer is not None}

    def speak(text: str) -> str:
        return "".join(spoken.get(part, part) for part in _split(text, spoken))

    try:
        same = parting.render([speak(content) for content in parting.contents]) == speak(parting.real)
    except QueryError:
        same = False
    if same:
        return ()
    return (
        f"{parting.path}: the chat template would write generated answers in another way than they were sampled "
        "(some templates cut the reasoning out of earlier answers); they are carried as sampled",
    )


def _split(text: str, nonces: Container[str]) -> list[str]:
    """The text cut at its nonces: what is between them, and they, in turn."""
    parts: list[str] = []
    position = 0
    for found in NONCE.finditer(text):
        if found[0] in nonces:
            parts += [text[position : found.start()], found[0]]
            position = found.end()
    return [*parts, text[position:]]


class _Parting:
    """One attempt to take a rendering apart."""

    def __init__(
        self, template: ChatTemplate, roles: Sequence[Role], contents: Sequence[str], nonces: Sequence[str], path: str
    ) -> None:
        self.template = template
        self.path = path
        self.contents = contents
        self._roles = roles
        self._index = {nonce: i for i, nonce in enumerate(nonces)}
        self._leads = [content[: len(content) - len(content.lstrip())] for content in contents]
        self._trails = [content[len(content.rstrip()) :] if content.strip() else "" for content in contents]
        self._nonces = nonces
        self._spaced = [a + nonce + b for a, nonce, b in zip(self._leads, nonces, self._trails, strict=True)]
        self.real = self.render(contents)

    def render(self, contents: Sequence[str]) -> str:
        return self.template.render(list(zip(self._roles, contents, strict=True)), where=self.path)

    def run(self) -> Rendering:
        """Take it apart; falls back to the whole text."""
        gaps, order = self._split(self.render(self._nonces))
        if len(set(order)) < len(order):
            return self.give_up("it repeats what a message says")
        spaced_gaps, spaced_order = (
            (gaps, order) if self._spaced == list(self._nonces) else self._split(self.render(self._spaced))
        )
        if spaced_order != order:
            return self.give_up("the order of messages depends on the white space around what they say")
        slots = [Slot(turn) for turn in order]
        for number, (bare, spaced) in enumerate(zip(gaps, spaced_gaps, strict=True)):
            before = order[number - 1] if number else None
            behind = order[number] if number < len(order) else None
            trail = "" if before is None else self._trails[before]
            lead = "" if behind is None else self._leads[behind]
            kept = _kept(trail, bare, lead, spaced)
            if kept is None:
                return self.give_up("it changes the white space around what a message says")
            if before is not None:
                slots[number - 1] = replace(slots[number - 1], cut_back=len(trail) - kept[0])
            if behind is not None:
                slots[number] = replace(slots[number], cut_front=len(lead) - kept[1])
        if self._join(gaps, slots) != self.real:
            found = self._find_rewritten(gaps, spaced_gaps, slots)
            if found is None or self._join(gaps, found) != self.real:
                return self.give_up("it rewrites what messages say, depending on what they say")
            slots = found
        return Rendering(tuple(gaps), tuple(slots), {})

    def _split(self, rendered: str) -> tuple[list[str], list[int]]:
        parts = _split(rendered, self._index)
        return parts[0::2], [self._index[nonce] for nonce in parts[1::2]]

    def give_up(self, why: str) -> Rendering:
        """The whole text, not taken apart."""
        return Rendering((), (), {}, self.real, why)

    def _written(self, slot: Slot) -> str:
        if slot.rewritten is not None:
            return slot.rewritten
        content = self.contents[slot.turn]
        return content[slot.cut_front : len(content) - slot.cut_back]

    def _join(self, gaps: Sequence[str], slots: Sequence[Slot]) -> str:
        written = [self._written(slot) for slot in slots]
        return "".join(text for pair in zip(gaps, [*written, ""], strict=True) for text in pair)

    def _find_rewritten(
        self, gaps: Sequence[str], spaced_gaps: Sequence[str], slots: Sequence[Slot]
    ) -> list[Slot] | None:
        """Which contents the template inspects: each is rendered among random words; None where that does not help."""
        if len(slots) < len(self.contents):
            return None
        found = list(slots)
        for number, slot in enumerate(slots):
            if not self.contents[slot.turn]:
                continue
            mixed = list(self._spaced)
            mixed[slot.turn] = self.contents[slot.turn]
            one_gaps, one_order = self._split(self.render(mixed))
            if one_order != [other.turn for i, other in enumerate(slots) if i != number]:
                return None
            others = [*spaced_gaps[:number], one_gaps[number], *spaced_gaps[number + 2 :]]
            if others != one_gaps:
                return None
            around = one_gaps[number]
            front, back = self._edges(gaps, slots, number)
            if len(around) < len(front) + len(back) or not (around.startswith(front) and around.endswith(back)):
                return None
            written = around[len(front) : len(around) - len(back)]
            if written != self._written(slot):
                found[number] = Slot(slot.turn, rewritten=written)
        return found

    def _edges(self, gaps: Sequence[str], slots: Sequence[Slot], number: int) -> tuple[str, str]:
        """The template's texts around a slot, with the white space that is kept of its neighbours."""
        front, back = gaps[number], gaps[number + 1]
        if number:
            slot = slots[number - 1]
            trail = self._trails[slot.turn]
            front = trail[: len(trail) - slot.cut_back] + front
        if number + 1 < len(slots):
            slot = slots[number + 1]
            back += self._leads[slot.turn][slot.cut_front :]
        return front, back


def _kept(trail: str, bare: str, lead: str, spaced: str) -> tuple[int, int] | None:
    """How many characters of white space of `trail` (its first) and `lead` (its last) are kept around the template's
    text `bare` in `spaced`; None where that is not how it came about."""
    total = len(spaced) - len(bare)
    likely = [(len(trail), len(lead)), (0, 0), (len(trail), 0), (0, len(lead))]
    for front, back in [*likely, *((n, total - n) for n in range(max(total, 0) + 1))]:
        if front + back != total or front > len(trail) or back > len(lead):
            continue
        if spaced == trail[:front] + bare + lead[len(lead) - back :]:
            return front, back
    return None
