"""The commands."""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spanflow.cli.output import FAILED, UNAVAILABLE, reporting, say
from spanflow.cli.queries import load_query, load_retrievers
from spanflow.cli.settings import (
    Debug,
    EngineName,
    File,
    Files,
    Json,
    Model,
    Options,
    Retrievers,
    RungName,
    SomeFiles,
    open_session,
)

if TYPE_CHECKING:
    from spanflow import explain as explained


class Stage(StrEnum):
    """What of an explanation is shown."""

    passes = "passes"
    spans = "spans"
    all = "all"


class Format(StrEnum):
    """How an explanation is shown."""

    text = "text"
    json = "json"
    mermaid = "mermaid"


app = typer.Typer(
    help="Span queries: say which parts of a prompt commute, and reuse their KV cache anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
demo = typer.Typer(help="Demonstrations on the embedded model.", no_args_is_help=True)
app.add_typer(demo, name="demo")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"spanflow {version('spanflow')}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Span queries: say which parts of a prompt commute, and reuse their KV cache anywhere."""


@app.command()
def run(
    file: File,
    retriever: Retrievers = None,
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a query."""
    with reporting(as_json=as_json, debug=debug) as output:
        query = load_query(file, load_retrievers(retriever, file))
        with closing(open_session(model, engine, rung, option)) as session:
            result = session.run(query)
        output.show(result.to_dict(), "\n\n".join(sample.text for sample in result.samples))
        if not as_json:
            from spanflow.cli.tables import describe_result

            say(describe_result(result))


@app.command()
def explain(
    file: File,
    retriever: Retrievers = None,
    stage: Annotated[
        Stage | None,
        typer.Option(help="The tree after each pass, the spans of each prompt, or both; without it, an overview."),
    ] = None,
    shape: Annotated[Format, typer.Option("--format", help="mermaid draws the tree as it runs.")] = Format.text,
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a query becomes, and bounds of what it would cost; starts no engine."""
    if as_json and shape is Format.mermaid:
        raise typer.BadParameter("--json is --format json; leave one of them out")
    if stage is Stage.passes and shape is Format.mermaid:
        raise typer.BadParameter("mermaid draws the tree as it runs, not the passes; leave --stage out")
    with reporting(as_json=as_json or shape is Format.json, debug=debug) as output:
        query = load_query(file, load_retrievers(retriever, file))
        with closing(open_session(model, engine, rung, option)) as session:
            explanation = session.explain(query)
        if shape is Format.mermaid:
            output.show(None, explanation.mermaid())
        else:
            name: explained.Stage | None = None if stage is None else stage.value
            output.show(explanation.to_dict(name), explanation.describe(name))


@app.command()
def fmt(
    files: Files,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit with 1 where it would.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Like --check, and show what would change.")] = False,
    width: Annotated[int, typer.Option(help="Characters in a line.", min=20)] = 100,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Format queries in the text form, in place; comments stay."""
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.cli.written import format_files

        raise typer.Exit(format_files(files, output, check=check, diff=diff, width=width))


@app.command()
def lint(
    files: SomeFiles = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Codes of checks to leave out.", metavar="SF003[,SF005]")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="The model's window, in tokens.", min=1)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of answers that name no bound.", min=1)] = 256,
    checks: Annotated[bool, typer.Option("--checks", help="Show what is checked, and end.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what is likely not meant in queries, or slow without need; exits with 1 where it finds some.

    In the text form the comment `; noqa: SF003`, on the line before something or behind it, silences a check there.
    """
    from spanflow.optimizer.lint import CHECKS

    known = [each.code for each in CHECKS]
    ignored = [code.strip().upper() for codes in ignore or () for code in codes.split(",")]
    if unknown := [code for code in ignored if code not in known]:
        raise typer.BadParameter(f"there is no check {', '.join(unknown)}; checks are {', '.join(known)}")
    if not files and not checks:
        raise typer.BadParameter("name queries to look at, as files, or --checks")
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.cli.written import lint_files

        if checks:
            what = {check.code: check.what for check in CHECKS}
            output.show(what, "\n".join(f"{code}  {text}" for code, text in what.items()))
            raise typer.Exit
        found = lint_files(files or [], output, ignore=ignored, max_model_len=max_model_len, max_tokens=max_tokens)
        raise typer.Exit(found)


@app.command()
def doctor(
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show versions, start the engine, and compare moved KV with KV recomputed on it, and by transformers."""
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.doctor import diagnose, installed

        versions = installed()
        if not as_json:
            output.show(None, "\n".join(f"{name:<13} {version}" for name, version in versions.items()))
        with closing(open_session(model, engine, None, option, only_our_code=True)) as session:
            diagnosis = diagnose(session)
        output.show({"versions": versions} | diagnosis.to_dict(), str(diagnosis))
        if not diagnosis.is_well:
            raise typer.Exit(UNAVAILABLE if diagnosis.engine is None else FAILED)


@demo.command()
def rag(
    questions: Annotated[int, typer.Option(help="Questions to ask, in two rounds each.")] = 8,
    documents: Annotated[int, typer.Option(help="Documents to retrieve for each question.")] = 4,
    compare: Annotated[bool, typer.Option(help="Ask with full attention as well.")] = True,
    seed: Annotated[int, typer.Option(help="Chooses the questions and the orders of documents.")] = 0,
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer questions over retrieved documents, which come in another order each time."""
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.cli.tables import describe_row, rag_tables
        from spanflow.demo.rag import run_rag

        with closing(open_session(model, engine, rung, option, **_comparing(engine))) as session:
            report = run_rag(
                session,
                num_questions=questions,
                num_documents=documents,
                rung=rung,
                compare=compare,
                seed=seed,
                on_row=lambda row: say(describe_row(row)),
            )
        output.print(*rag_tables(report))
        if as_json:
            output.show(report.to_dict())


@demo.command()
def judge(
    candidates: Annotated[int, typer.Option(help="Candidates that the judge reads, from 2 to 24.")] = 8,
    temperature: Annotated[float, typer.Option(help="Temperature at which candidates are drawn.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the candidates.")] = 0,
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw candidates, and let a judge read them by taking their KV over."""
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.cli.tables import describe_judged, judge_tables
        from spanflow.demo.judge import run_judge

        with closing(open_session(model, engine, rung, option, **_comparing(engine))) as session:
            report = run_judge(
                session,
                num_candidates=candidates,
                temperature=temperature,
                seed=seed,
                on_run=lambda way, judged: say(describe_judged(way, judged)),
            )
        output.print(*judge_tables(report))
        if as_json:
            output.show(report.to_dict())


def _comparing(engine: str) -> dict[str, Any]:
    """Room for what both ways of a comparison keep, so that neither evicts the other's KV; no code but our own runs."""
    return {"only_our_code": True} | ({"cpu_kv_cache_gib": 1.5} if engine == "vllm" else {})
