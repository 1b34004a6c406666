"""The commands that need no model: formatting the text form, and advice on queries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any

from spanflow.cli.output import FAILED, REJECTED, Output, say
from spanflow.cli.queries import (
    STDIN,
    AnyRetriever,
    is_python,
    is_text_form,
    load_query,
    query_of,
    read_source,
    source_name,
)
from spanflow.errors import QueryError
from spanflow.ir.nodes import Node
from spanflow.ir.text import format_text
from spanflow.optimizer.lint import Finding, lint, lint_text


def format_files(files: Sequence[Path], output: Output, *, check: bool, diff: bool, width: int) -> int:
    """Format queries in place, those from stdin to stdout; with `check` or `diff` only say what would change.

    What is no query is left as it is. Under JSON each file has the formatted text, or with `diff` what would change.
    Returns the exit code: 0, FAILED where `check` found something, REJECTED.
    """
    check = check or diff
    done: list[dict[str, Any]] = []
    shown = "diff" if diff else "text"
    for file in files:
        name = source_name(file)
        try:
            before, after = _formatted(file, width)
            if before != after and not check and file != STDIN:
                file.write_bytes(after.encode())
        except (QueryError, OSError) as error:
            say(f"error: {error}")
            done.append({"file": name, "is_changed": False, shown: None, "error": str(error)})
            continue
        if before != after:
            say(f"{'would reformat' if check else 'reformatted'} {name}: {_changes(before, after)}")
        text = _diff(before, after, name) if diff else after
        done.append({"file": name, "is_changed": before != after, shown: text, "error": None})
        if not output.as_json and (diff or (file == STDIN and not check)):
            output.write(text)
    if output.as_json:
        output.show({"files": done})
    num_changed = sum(each["is_changed"] for each in done)
    num_wrong = sum(each["error"] is not None for each in done)
    say(_summary(len(done), num_changed, num_wrong, check=check))
    if num_wrong:
        return REJECTED
    return FAILED if check and num_changed else 0


def _formatted(file: Path, width: int) -> tuple[str, str]:
    if file != STDIN and file.suffix != ".span":
        raise QueryError(f"{file}: only the text form is formatted, in files that end in .span, or from stdin as -")
    source = read_source(file)
    return source, format_text(source, width=width, filename=source_name(file))


def _changes(before: str, after: str) -> str:
    """How many lines come and go."""
    matcher = SequenceMatcher(None, before.splitlines(keepends=True), after.splitlines(keepends=True), autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    return f"+{sum(edit[4] - edit[3] for edit in edits)} -{sum(edit[2] - edit[1] for edit in edits)} lines"


def _diff(before: str, after: str, name: str) -> str:
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _summary(num_files: int, num_changed: int, num_wrong: int, *, check: bool) -> str:
    counts = [
        (num_changed, "would be reformatted" if check else "reformatted"),
        (num_files - num_changed - num_wrong, "formatted already"),
        (num_wrong, "could not be read or written"),
    ]
    return ", ".join(f"{_counted(count, 'file')} {what}" for count, what in counts if count)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def lint_files(
    files: Sequence[Path], output: Output, *, ignore: Collection[str], max_model_len: int | None, max_tokens: int
) -> int:
    """Show what the checks find in queries, file by file.

    A file that is no query is told on stderr, and the others are checked still. Returns the exit code: 0, FAILED where
    something was found, REJECTED where a file could not be read.
    """
    found: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    lines: list[str] = []
    for file in files:
        name = source_name(file)
        try:
            findings = _findings(file, ignore=ignore, max_model_len=max_model_len, max_tokens=max_tokens)
        except (QueryError, OSError) as error:
            say(f"error: {error}")
            errors.append({"file": name, "message": str(error)})
            continue
        found += [{"file": name, **asdict(finding)} for finding in findings]
        lines += [f"{name}:{'' if finding.line else ' '}{finding}" for finding in findings]
    if output.as_json:
        output.show({"findings": found, "errors": errors})
    elif lines:
        output.show(None, "\n".join(lines))
    num_read = _counted(len(files) - len(errors), "file")
    wrong = f", {_counted(len(errors), 'file')} could not be read" if errors else ""
    say(f"{_counted(len(found), 'finding') if found else 'nothing found'} in {num_read}{wrong}")
    if errors:
        return REJECTED
    return FAILED if found else 0


def _findings(file: Path, **options: Any) -> tuple[Finding, ...]:
    if is_python(file):
        return _findings_of(load_query(file, AnyRetriever()), file, **options)
    source = read_source(file)
    if is_text_form(source, file):
        return lint_text(source, filename=source_name(file), retrievers=AnyRetriever(), **options)
    return lint(query_of(source, file, AnyRetriever()), **options)


def _findings_of(query: Any, file: Path, **options: Any) -> tuple[Finding, ...]:
    """Of what a Python file defines, which may be anything that a session runs."""
    from spanflow.compile import as_generate

    try:
        return lint(query if isinstance(query, Node) else as_generate(query), **options)
    except QueryError as error:
        raise QueryError(f"{file}: {error}") from None
