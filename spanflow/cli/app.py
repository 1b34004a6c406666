"""The commands."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from spanflow.cli.output import FAILED, UNAVAILABLE, reporting, say
from spanflow.cli.settings import Debug, EngineName, File, Json, Model, Options, RungName, load_query, open_session

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
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the `query` of a Python file."""
    with reporting(as_json=as_json, debug=debug) as output:
        query = load_query(file)
        with closing(open_session(model, engine, rung, option)) as session:
            result = session.run(query)
        output.show(result.to_dict(), "\n\n".join(sample.text for sample in result.samples))
        if not as_json:
            from spanflow.cli.tables import describe_result

            say(describe_result(result))


@app.command()
def explain(
    file: File,
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    rung: RungName = None,
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what the `query` of a Python file becomes, and what it would cost; starts no engine."""
    with reporting(as_json=as_json, debug=debug) as output:
        query = load_query(file)
        with closing(open_session(model, engine, rung, option)) as session:
            explanation = session.explain(query)
        output.show(explanation.to_dict(), str(explanation))


@app.command()
def doctor(
    model: Model = "smollm2",
    engine: EngineName = "vllm",
    option: Options = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show versions, start the engine, and compare moved KV with recomputed KV on it."""
    with reporting(as_json=as_json, debug=debug) as output:
        from spanflow.doctor import diagnose, installed

        versions = installed()
        if not as_json:
            output.show(None, "\n".join(f"{name:<13} {version}" for name, version in versions.items()))
        with closing(open_session(model, engine, None, option)) as session:
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

        with closing(open_session(model, engine, rung, option, **_memory(engine))) as session:
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
    candidates: Annotated[int, typer.Option(help="Candidates that the judge reads.")] = 8,
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

        with closing(open_session(model, engine, rung, option, **_memory(engine))) as session:
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


def _memory(engine: str) -> dict[str, float]:
    """Room for what both ways of a comparison keep, so that neither evicts the other's KV."""
    return {"kv_cache_gib": 2.0} if engine == "vllm" else {}
