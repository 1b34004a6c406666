"""What a model's chat template is made of, found from its structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any, get_args

from spanflow.errors import ModelError, QueryError
from spanflow.ir.nodes import Role
from spanflow.lowering.pieces import PieceTokenizer, num_shared

#: What `ChatTemplate.nonces` makes. No two of them overlap: the first letter is no hexadecimal digit.
NONCE = re.compile("n[0-9a-f]{32}")
ROLES: tuple[Role, ...] = get_args(Role)


class ChatTemplate:
    """A tokenizer's chat template, taken apart into the constant texts around a message.

    `tokenizer` is a Hugging Face tokenizer, or anything with its `chat_template`, `apply_chat_template`,
    `encode`, `get_added_vocab`, `bos_token`, `eos_token` and `eos_token_id`. `options` go to the template
    with each rendering (such as `enable_thinking`). `end_ids` are further ids that end an answer, besides the
    tokenizer's end of sequence and the template's end of turn. Raises ModelError where there is no template,
    or it cannot render one user message.

    Attributes: `pieces` tokenises parts of a prompt; `opening` and `closing` are the texts before and behind the
    content of a message inside a conversation, by role; `generation_header` asks for an answer; `end_of_turn`
    and `end_of_turn_id` end an assistant's message ("" and None where the template has no such token).
    """

    def __init__(
        self, tokenizer: Any, *, options: Mapping[str, Any] | None = None, end_ids: Iterable[int] = ()
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "the model's tokenizer has no chat template, so there is no telling how its messages look; "
                "use a model tuned for chat, or set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self.pieces = PieceTokenizer(tokenizer)
        self.opening: Mapping[Role, str]
        self.closing: Mapping[Role, str]
        self._probe()
        eos = getattr(tokenizer, "eos_token_id", None)
        known = [eos, self.end_of_turn_id, *end_ids]
        self.end_ids: frozenset[int] = frozenset(int(token) for token in known if token is not None)
        self._headers: dict[Role, tuple[int, ...]] = {
            role: self.pieces.encode_first(self.bos + self.opening[role]) for role in ROLES
        }

    def render(self, messages: Sequence[tuple[Role, str]], *, is_asked: bool = True, where: str = "$") -> str:
        """The conversation as the template writes it; `is_asked`: with the header of the answer behind it.

        Raises QueryError with the template's own words where it refuses the messages.
        """
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=is_asked, **self._options
            )
        except Exception as error:  # a template is a program of the model's author: it may fail in any way
            roles = ", ".join(role for role, _ in messages)
            raise QueryError(
                f"{where}: the model's chat template refuses these messages ({roles}): {error}. Many templates want "
                "roles that alternate, user first: put the documents inside one message, as in "
                "user(commute(...), question)"
            ) from error
        return str(text)

    def header(self, role: Role) -> tuple[int, ...]:
        """The ids of the constant opening of a message of this role at the beginning of a prompt, BOS included."""
        return self._headers[role]

    def headers(self) -> tuple[tuple[int, ...], ...]:
        """The headers of all roles, without duplicates: the anchors that a template gives."""
        return tuple(dict.fromkeys(header for header in self._headers.values() if header))

    def nonces(self, number: int, texts: Iterable[str] = ()) -> list[str]:
        """Fresh random words that occur in none of the texts, nor in the template."""
        haystack = "\0".join([str(self._tokenizer.chat_template), *texts])
        found: list[str] = []
        while len(found) < number:
            nonce = f"n{token_hex(16)}"
            if nonce not in haystack and nonce not in found:
                found.append(nonce)
        return found

    def _probe(self) -> None:
        """Find openings, closings, the header of the answer and the end of turn from a few renderings."""
        user, answer, again = self.nonces(3)
        try:
            plain, asked = self.render([("user", user)], is_asked=False), self.render([("user", user)])
        except QueryError as error:
            raise ModelError(f"the model's chat template cannot render one user message: {error}") from error
        try:
            (head, tail), asked = _around(plain, user), _around(asked, user)[1]
        except ValueError:  # there is no telling its parts: prompts are rendered whole, without spans
            head = tail = asked = ""
        # A template may write the end of the last message differently: what both ways share is the closing.
        turns: list[tuple[Role, str]] = [("user", user), ("assistant", answer), ("user", again)]
        try:
            rest = _around(self.render(turns, is_asked=False), user)[1]
            before_answer, rest = _around(rest, answer)
            before_user = _around(rest, again)[0]
            last = _around(self.render(turns[:2], is_asked=False), answer)[1]
        except (QueryError, ValueError):  # one turn only
            before_answer, before_user, last = asked, head, ""
        user_closing = self._shared(tail, before_answer)
        self.generation_header = asked.removeprefix(tail) if asked.startswith(tail) else asked[len(user_closing) :]
        self.end_of_turn = self._find_end_of_turn(before_user, last)
        self.end_of_turn_id = self.pieces.markers.get(self.end_of_turn)
        answer_closing = self._shared(last, before_user)
        user_opening = before_user[len(answer_closing) :]
        if not head.endswith(user_opening):
            user_opening = head[len(head) - num_shared(user_opening[::-1], head[::-1]) :]
        self._finish(head, user_opening, user_closing, before_answer[len(user_closing) :], answer_closing)

    def _finish(
        self, head: str, user_opening: str, user_closing: str, answer_opening: str, answer_closing: str
    ) -> None:
        """Set what `_probe` found, and BOS and the system message's texts with it."""
        system, user = self.nonces(2)
        system_opening, system_closing = user_opening, ""
        try:
            rendered = self.render([("system", system), ("user", user)], is_asked=False)
            system_opening, rest = _around(rendered, system)
            between = _around(rest, user)[0]
            system_closing = between.removesuffix(user_opening)
        except (QueryError, ValueError):  # there is no system message in this template, or it moves about
            system_opening = user_opening or head
        bos = str(getattr(self._tokenizer, "bos_token", None) or "")
        # Some models call the opening of every message their BOS; that is no BOS of a prompt.
        self.bos = bos if bos and head.startswith(bos) and not user_opening.startswith(bos) else ""
        self.opening = {
            "system": system_opening.removeprefix(self.bos),
            "user": user_opening,
            "assistant": answer_opening,
        }
        self.closing = {"system": system_closing, "user": user_closing, "assistant": answer_closing}

    def _shared(self, one: str, other: str) -> str:
        """The common beginning of two texts, not ending inside a control token."""
        shared = one[: num_shared(one, other)]
        for start, marker in self.pieces.find_markers(other):
            if start < len(shared) < start + len(marker):
                return shared[:start]
        return shared

    def _find_end_of_turn(self, before_user: str, last: str) -> str:
        """The control token that follows an answer, white space aside, also where nothing follows it."""
        eos = getattr(self._tokenizer, "eos_token", None)
        for start, marker in self.pieces.find_markers(before_user):
            if not before_user[:start].strip() and (marker in last or marker == eos):
                return marker
            break
        return ""


def headers_of(tokenizer: Any) -> list[list[int]]:
    """The message headers of a tokenizer's chat template; none where it has no template. Raises as `ChatTemplate`."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    return [list(header) for header in ChatTemplate(tokenizer).headers()]


def _around(text: str, nonce: str) -> tuple[str, str]:
    """The texts before and behind the one place of a nonce. Raises ValueError where there is not one."""
    before, found, behind = text.partition(nonce)
    if not found or nonce in behind:
        raise ValueError("the template drops or repeats what a message says")
    return before, behind
