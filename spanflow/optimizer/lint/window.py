"""Checks of how much a prompt reads, by a rough count of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from spanflow.ir.nodes import Chat, Generate
from spanflow.optimizer.lint.finding import Found, Limits
from spanflow.optimizer.lint.reading import Answer, Group, Operand, Reading, Said

#: Tokens of a chat template around each message, about.
_TOKENS_PER_MESSAGE = 8
_BYTES_PER_TOKEN = 4


def num_tokens(text: str) -> int:
    """About how many tokens a text has: a quarter of its bytes, which is within a third for most of them."""
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)


def overflows(reading: Reading, limits: Limits) -> Iterator[Found]:
    """A prompt with a commute whose operands, taken together, do not fit the model's window."""
    window = limits.max_model_len
    if window is None or reading.node is None or not reading.groups:
        return
    sizes: dict[Group, list[int]] = {group: [] for group in reading.groups}
    operands: dict[Operand, int] = {}
    rest = _TOKENS_PER_MESSAGE + _answer(reading.node, limits)
    for part in reading.parts:
        size = _size(part, limits)
        if part.operand is None:
            rest += size
        elif isinstance(part, Answer) and part.is_operand:
            sizes[part.operand.group] += [size // part.num_samples] * part.num_samples
        else:
            operands[part.operand] = operands.get(part.operand, 0) + size
    for operand, size in operands.items():
        sizes[operand.group].append(size)
    judged = max(sizes, key=lambda group: sum(sizes[group]))
    rest += sum(sum(others) for group, others in sizes.items() if group is not judged)
    arity = reading.node.arity if isinstance(reading.node, Generate) and reading.node.reduce else len(sizes[judged])
    widest = sorted(sizes[judged], reverse=True)[:arity]
    total = rest + sum(widest)
    if total <= window or len(widest) < 2:
        return
    fitting = (window - rest) // max(widest)
    are_generated = any(answer.group is judged for answer in reading.answers)
    yield (
        judged.place,
        f"its {len(widest)} operands have about {sum(widest):,} tokens, with the rest of the prompt and its answer "
        f"{total:,}, and the model's window is {window:,}",
        _fix(fitting, are_generated),
    )


def _fix(fitting: int, are_generated: bool) -> str:
    if fitting >= 2 and are_generated:
        return (
            f"judge them in a tree with generate(..., reduce='tree', arity={fitting}) over "
            "commute(..., associative=True), or ask the candidates for fewer tokens"
        )
    if are_generated:
        return "ask the candidates for fewer tokens with max_tokens, or open the session with a larger max_model_len"
    return f"leave it at {max(fitting, 1)} of them, or open the session with a larger max_model_len"


def _size(part: Said | Answer, limits: Limits) -> int:
    if isinstance(part, Said):
        return num_tokens(part.text) + _TOKENS_PER_MESSAGE
    return part.num_samples * (_answer(part.node, limits) + _TOKENS_PER_MESSAGE)


def _answer(node: Generate | Chat, limits: Limits) -> int:
    return node.sampling.max_tokens or limits.max_tokens
