"""A rendered conversation as a row of pieces: text or ids, and the span that each belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spanflow.errors import QueryError
from spanflow.ir.nodes import Role
from spanflow.lowering.conversation import Chunk, Conversation, Generated, Operand, Turn
from spanflow.lowering.rendering import Rendering, Slot
from spanflow.lowering.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the prompt: text (`is_data` where it comes from the query), or `token_ids` of an answer.

    `mark` is the index of the span it belongs to, `group` the commute that it stands in, or None.
    """

    text: str
    is_data: bool = False
    mark: int | None = None
    group: int | None = None
    token_ids: tuple[int, ...] | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A span to be: an operand's text in a message of `role`, or an answer."""

    operand: Operand
    role: Role
    answer: Generated | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Pieces in order, their spans, and what the author should know."""

    pieces: tuple[Piece, ...]
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]


def lay_out(template: ChatTemplate, conversation: Conversation, rendering: Rendering, path: str) -> Layout:
    """Say which text of a rendering belongs to which span.

    Raises QueryError where the template cannot be taken apart and a text spells one of its control tokens.
    """
    builder = _Builder(template, conversation, rendering, list(rendering.notes))
    if rendering.whole is not None:
        builder.lay_whole(rendering.whole, path)
    else:
        builder.lay_slots()
    return Layout(tuple(builder.pieces), tuple(builder.marks), tuple(builder.notes))


class _Bounds(NamedTuple):
    """Where the closing of the turn before ends in a text of the template, and the opening of the next begins."""

    end: int
    start: int
    is_clean_end: bool
    is_clean_start: bool


@dataclass(slots=True)
class _Builder:
    template: ChatTemplate
    conversation: Conversation
    rendering: Rendering
    notes: list[str]
    pieces: list[Piece] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    mark_of: dict[int, int] = field(default_factory=dict)  # operand -> mark of its text
    is_trimmed: set[int] = field(default_factory=set)  # groups whose spans are contents, without what is around them
    is_dropped: set[int] = field(default_factory=set)  # groups without spans

    def lay_whole(self, text: str, path: str) -> None:
        """All of it as the template's text: only where no text of the query spells a control token."""
        for turn in self.conversation.turns:
            for chunk in turn.chunks:
                for _, marker in self.template.pieces.find_markers(chunk.text):
                    raise QueryError(
                        f"{chunk.path or turn.path}: the text contains {marker!r}, a control token of this model, and "
                        f"its chat template leaves no way to tell text from markup here ({self.rendering.why}); "
                        "remove it from the text"
                    )
        for part in self.rendering.split_answers(text):
            self._add_part(part, Piece(""))
        if self.conversation.operands:
            self.notes.append(
                f"{path}: no spans: the chat template cannot be taken apart for these messages: {self.rendering.why}"
            )

    def lay_slots(self) -> None:
        """Piece by piece, the template's texts and the contents in turn."""
        rendering = self.rendering
        turns = [self.conversation.turns[slot.turn] for slot in rendering.slots]
        around: list[Turn | None] = [None, *turns, None]
        bounds = [self._bounds(gap, around[i], around[i + 1]) for i, gap in enumerate(rendering.structure)]
        self._judge_groups(bounds)
        for number, gap in enumerate(rendering.structure):
            before, behind = around[number], around[number + 1]
            skipped = self._skip_end_of_turn(before, gap)
            end, start = max(bounds[number].end, skipped), max(bounds[number].start, skipped)
            outer_before, outer_behind = self._outside(before), self._outside(behind)
            self._add(replace(outer_before, text=gap[skipped:end]))
            self._add(replace(outer_before if outer_before == outer_behind else Piece(""), text=gap[end:start]))
            if behind is not None and behind.is_answer:
                self._lay_answer(behind, gap[start:], outer_behind, rendering.structure[number + 1])
            elif behind is not None:
                self._add(replace(outer_behind, text=gap[start:]))
                self._lay_content(behind, rendering.slots[number])

    def _bounds(self, gap: str, before: Turn | None, behind: Turn | None) -> _Bounds:
        closing = "" if before is None else self.template.closing[before.role]
        is_clean_end = gap.startswith(closing)
        end = len(closing) if is_clean_end else 0
        opening = "" if behind is None else self.template.opening[behind.role]
        is_clean_start = behind is not None and gap.endswith(opening) and len(gap) - len(opening) >= end
        start = len(gap) - len(opening) if is_clean_start else len(gap)
        if behind is not None and behind.is_answer and not is_clean_start:
            start = end  # whatever the template writes there, as its opening
        return _Bounds(end, start, is_clean_end, is_clean_start)

    def _judge_groups(self, bounds: Sequence[_Bounds]) -> None:
        """Find the commutes of whole messages whose operands cannot be cut where their messages begin and end.

        Then all of its spans are trimmed to the contents, or which operand comes first would change their tokens.
        """
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number, slot in enumerate(self.rendering.slots):
            operand = self.conversation.turns[slot.turn].operand
            if operand is not None and self._is_span(operand):
                numbers[operand].append(number)
        num_turns: defaultdict[int, int] = defaultdict(int)
        for turn in self.conversation.turns:
            if turn.operand is not None:
                num_turns[turn.operand] += 1
        for operand, at in numbers.items():
            here = self.conversation.operands[operand]
            first, last = at[0], at[-1]
            if last - first + 1 != len(at) or num_turns[operand] != len(at):
                if here.group not in self.is_dropped:
                    self.notes.append(f"{here.path}: spans dropped: the chat template moves or drops these messages")
                self.is_dropped.add(here.group)
            elif not (bounds[first].is_clean_start and bounds[last + 1].is_clean_end):
                if here.group not in self.is_trimmed:
                    self.notes.append(
                        f"{here.path}: spans trimmed to what the messages say: the chat template opens or closes "
                        "them differently by place"
                    )
                self.is_trimmed.add(here.group)

    def _is_span(self, operand: int) -> bool:
        """Whether an operand's text becomes a span."""
        here = self.conversation.operands[operand]
        return (
            operand not in self.conversation.mixed and here.rung.name != "exact" and here.group not in self.is_dropped
        )

    def _mark_text(self, operand: int, role: Role) -> int:
        if operand not in self.mark_of:
            self.mark_of[operand] = len(self.marks)
            self.marks.append(Mark(self.conversation.operands[operand], role))
        return self.mark_of[operand]

    def _within(self, operand: int | None, role: Role) -> Piece:
        """An empty piece of an operand's text."""
        if operand is None:
            return Piece("")
        group = self.conversation.operands[operand].group
        return Piece("", mark=self._mark_text(operand, role) if self._is_span(operand) else None, group=group)

    def _outside(self, turn: Turn | None) -> Piece:
        """An empty piece of what stands around a turn's content."""
        if turn is None or turn.operand is None:
            return Piece("")
        piece = self._within(turn.operand, turn.role)
        return replace(piece, mark=None) if piece.group in self.is_trimmed else piece

    def _skip_end_of_turn(self, turn: Turn | None, gap: str) -> int:
        """How many characters behind an answer are left away, since the answer ends with that token itself."""
        end = self.template.end_of_turn
        if turn is None or not turn.is_answer or turn.chunks[0].token_ids[-1] != self.template.end_of_turn_id:
            return 0
        blank = len(gap) - len(gap.lstrip())
        return blank + len(end) if gap.startswith(end, blank) else 0

    def _lay_answer(self, turn: Turn, opening: str, outside: Piece, gap_behind: str) -> None:
        """The message of an inner generation, behind the header that the model saw there."""
        header = self.template.generation_header
        if opening.startswith(header) and not opening[len(header) :].strip():
            opening = header  # the answer brings its own white space
        (chunk,) = turn.chunks
        mark = self._mark_answer(chunk, turn.role)
        self._add(replace(outside, text=opening, mark=mark))
        # Another end than the template's is left away: the template's follows.
        ids = chunk.token_ids if self._skip_end_of_turn(turn, gap_behind) else self._without_end(chunk)
        self._add(replace(outside, mark=mark, token_ids=ids))

    def _without_end(self, chunk: Chunk) -> tuple[int, ...]:
        ids = chunk.token_ids
        return ids[:-1] if ids[-1] in self.template.end_ids else ids

    def _mark_answer(self, chunk: Chunk, role: Role) -> int | None:
        if chunk.operand is None or chunk.answer is None or not chunk.answer.is_leased:
            return None
        if self.conversation.operands[chunk.operand].answer_rung.name == "exact":
            return None
        self.marks.append(Mark(self.conversation.operands[chunk.operand], role, chunk.answer))
        return len(self.marks) - 1

    def _lay_content(self, turn: Turn, slot: Slot) -> None:
        if slot.rewritten is not None:
            self._lay_rewritten(turn, slot.rewritten)
            return
        chunks = [(chunk, self._place(chunk, turn)) for chunk in turn.chunks]
        texts = [chunk.text for chunk, _ in chunks]
        is_own = [turn.operand is None and piece.mark is not None for _, piece in chunks]
        cut_front = _trim(texts, is_own, slot.cut_front, front=True)
        cut_back = _trim(texts, is_own, slot.cut_back, front=False)
        if cut_front < slot.cut_front or cut_back < slot.cut_back:
            self.notes.append(
                f"{turn.path}: the chat template trims white space at the ends of a message; that of a span is kept, "
                "so that its tokens do not depend on its place"
            )
        for (_, piece), text in zip(chunks, texts, strict=True):
            self._add(replace(piece, text=text))

    def _place(self, chunk: Chunk, turn: Turn) -> Piece:
        """The piece of a chunk, still without text."""
        piece = self._within(chunk.operand, turn.role)
        if chunk.answer is not None:
            return replace(piece, mark=self._mark_answer(chunk, turn.role), token_ids=chunk.token_ids)
        return replace(piece, is_data=True, path=chunk.path or turn.path)

    def _lay_rewritten(self, turn: Turn, text: str) -> None:
        """What the template made of a content: one text, without spans of its own."""
        if any(chunk.operand is not None and (turn.operand is None or chunk.answer) for chunk in turn.chunks):
            self.notes.append(f"{turn.path}: spans dropped: the chat template rewrites what this message says")
        # What the template put in may hold its control tokens; what the text spells may not.
        is_data = any(True for chunk in turn.chunks for _ in self.template.pieces.find_markers(chunk.text))
        outside = self._within(turn.operand, turn.role) if turn.operand is not None else Piece("")
        for part in self.rendering.split_answers(text):
            self._add_part(part, replace(outside, is_data=is_data, path=turn.path))

    def _add_part(self, part: str | Chunk, like: Piece) -> None:
        match part:
            case str():
                self._add(replace(like, text=part))
            case Chunk():
                self._add(replace(like, token_ids=self._without_end(part)))

    def _add(self, piece: Piece) -> None:
        if piece.text or piece.token_ids:
            self.pieces.append(piece)


def _trim(texts: list[str], is_kept: Sequence[bool], num_chars: int, *, front: bool) -> int:
    """Take up to `num_chars` off one end of a row of texts, stopping at one that is kept; returns how many came off."""
    left = num_chars
    for i in range(len(texts)) if front else range(len(texts) - 1, -1, -1):
        if is_kept[i] or not left:
            break
        taken = min(left, len(texts[i]))
        texts[i] = texts[i][taken:] if front else texts[i][: len(texts[i]) - taken]
        left -= taken
    return num_chars - left
