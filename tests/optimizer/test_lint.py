"""The checks find what they are for, and leave alone what only looks like it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from strategies import queries

from spanflow import assistant, chat, commute, fragment, generate, seq, system, user
from spanflow.demo.corpus import load_documents
from spanflow.errors import QueryError
from spanflow.ir.nodes import Node, Seq, Text
from spanflow.ir.walk import preorder
from spanflow.optimizer.lint import CHECKS, Finding, lint
from spanflow.optimizer.pipeline import optimise


def found(root: Node, **options: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.path) for finding in lint(root, **options)]


def ask(*operands: Any, question: str = "What does the model say?", head: str = "Answer briefly.") -> Node:
    return generate(seq(system(head), commute(*operands), user(question)))


def first_text(code: str) -> list[tuple[str, str]]:
    return [(code, "$.query.operands[1].operands[0].parts[0]")]


SEA = user("The sea is blue.")


@pytest.mark.parametrize(
    "text",
    [
        "Document 3: the sky is blue.",
        "[Document 3] The sky is blue.",
        "## Candidate B\nThe sky is blue.",
        "Rank 2: the sky is blue.",
        "First, say what colour the sky is.",
        "Read this first: the sky is blue.",
        "As the previous document says, the sky is blue.",
        "Repeat the first answer.",
        "The sky has the colour mentioned above.",
        "Unlike the above, the sky is blue. See document 2.",
        "This contradicts candidate 2.",
        "The colour is that of the one above.",
        "As said above, the sky is blue.",
        "The sky is blue, as explained earlier.",
        "The above text says that the sky is blue.",
    ],
)
def test_sf001_an_operand_that_speaks_of_an_order(text: str) -> None:
    assert found(ask(user(text), SEA)) == first_text("SF001")
    assert found(generate(user(commute(text, "The sea is blue."), "Which?"))) == [
        ("SF001", "$.query.parts[0].operands[0]")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The first president was George Washington.",
        "First National Bank was founded in 1863.",
        "Sales rose over the previous year, as reported earlier.",
        "He could answer 70 questions, and answer a question in 3 seconds.",
        "Firstly built in 1200, the castle was rebuilt twice.",
        "It is the second of three; the third was lost.",
        "The temperature is above zero.",
        "1. Introduction",
        "Option pricing has 2 models.",
        "the last of the mohicans",
        "A document 3x as long.",
        "Long text about itself. " * 30 + "As the first document mentioned above says.",
    ],
)
def test_sf001_leaves_alone(text: str) -> None:
    assert found(ask(user(text), SEA)) == []


def test_sf001_ranks_are_numbers_that_differ() -> None:
    two = [("SF001", f"$.query.operands[1].operands[{i}].parts[0]") for i in range(2)]
    assert found(ask(user("[1] The sky."), user("[2] The sea."))) == two
    assert found(ask(user("1. The sky."), user("2. The sea."))) == two
    assert found(ask(user("(1) The sky."), user("(1) The sea."))) == []
    inside = [("SF001", f"$.query.operands[1].parts[0].operands[{i}]") for i in range(2)]
    documents = [fragment("[1] The sky."), fragment("[2] The sea.")]
    assert found(generate(seq(system("s"), user(commute(*documents), "Which?")))) == inside
    # Chapters of a book, and a piece of one that speaks of others.
    chapters = [fragment("1. The sky."), fragment("2. The sea. As the first document says."), fragment("Result 3: no")]
    assert found(generate(seq(system("s"), user(commute(*chapters), "Which?")))) == []


def test_sf001_only_where_operands_commute() -> None:
    steps = [user("First, read document 1."), user("Then, as mentioned above, answer.")]
    assert found(generate(seq(*steps))) == []
    assert len(found(generate(seq(commute(*steps), user("q"))))) == 2


def test_sf001_in_a_nested_query() -> None:
    inner = generate(seq(commute(user("Document 1: a"), user("b")), user("q")))
    path = "$.query.operands[0].operands[0].query.operands[0].operands[0].parts[0]"
    assert found(generate(seq(commute(inner, inner), user("Best?"))))[0] == ("SF001", path)


@pytest.mark.parametrize(
    "text",
    [
        "Is the first candidate right?",
        "Compare candidate 1 with candidate 2.",
        "Answer with the number of the best answer.",
        "Say which is best, and reply only with its index.",
        "Give the position of the document that says so.",
    ],
)
def test_sf002_words_that_count_operands(text: str) -> None:
    assert found(ask(user("The sky."), SEA, question=text)) == [("SF002", "$.query.operands[2].parts[0]")]
    assert found(ask(user("The sky."), SEA, head=text)) == [("SF002", "$.query.operands[0].parts[0]")]


@pytest.mark.parametrize(
    "text",
    [
        "Which of the candidates is best? Repeat it.",
        "First answer the question, then explain.",
        "Answer with a number of at most three digits.",
        "Answer with the number of apples, and the number of the answers.",
        "How many documents are there?",
        "Use the following documents and nothing else.",
        "The documents above say it.",
    ],
)
def test_sf002_leaves_alone(text: str) -> None:
    assert found(ask(user("The sky."), SEA, question=text)) == []


def test_sf002_where_operands_bring_their_names() -> None:
    named = [user("Candidate A: the sky."), user("Candidate B: the sea.")]
    assert "SF002" not in {code for code, _ in found(ask(*named, question="Is candidate B right?"))}
    assert found(ask(user("The sky."), question="Is the first candidate right?")) == []
    samples = generate(user("Colour?"), n=4)
    assert found(ask(samples, question="Is the first candidate right?")) == [("SF002", "$.query.operands[2].parts[0]")]
    assert found(generate(seq(user("Is the first candidate right?"), assistant("no"), user("Sure?")))) == []


def test_sf003_a_question_among_its_documents() -> None:
    path = ("SF003", "$.query.operands[1].operands[2]")
    question = user("What colour is the sky?")
    assert found(generate(seq(system("s"), commute(user("The sky."), SEA, question)))) == [path]
    assert found(generate(seq(system("s"), commute(user("The sky."), generate(user("Sea?")), question)))) == [path]
    assert found(ask(user("The sky."), SEA, user("Question: what colour is it?"))) == [path]
    assert found(generate(user(commute("The sky.", "The sea.", "What colour?")))) == [
        ("SF003", "$.query.parts[0].operands[2]")
    ]


@pytest.mark.parametrize(
    "root",
    [
        ask(user("The sky?"), SEA),  # asked behind the commute: a document may end like this
        ask(user("Why?"), user("How?")),
        generate(seq(system("Answer each."), commute(user("Why?"), user("How?")))),
        generate(seq(system("s"), user("What colour?"), commute(user("The sky."), SEA))),
        generate(seq(system("s"), commute(fragment("Is the sky blue?"), fragment("Yes.")))),
        generate(seq(system("s"), commute(seq(user("Sky?"), assistant("Blue.")), SEA))),
        generate(commute(user("Why?"))),
        generate(seq(commute(user("x " * 200 + "?"), SEA))),
    ],
    ids=range(8),
)
def test_sf003_leaves_alone(root: Node) -> None:
    assert found(root) == []


def judge(number: int, tokens: int | None = 200, **options: Any) -> Node:
    candidates = [generate(user(f"Topic {i}"), max_tokens=tokens) for i in range(number)]
    group = commute(*candidates, associative=True)
    return generate(seq(system("Judge."), group, user("Best?")), max_tokens=100, **options)


def test_sf004_a_judge_that_is_too_wide() -> None:
    (finding,) = lint(judge(24), max_model_len=2048)
    assert finding == Finding(
        "SF004",
        "$.query.operands[1]",
        "its 24 operands have about 4,992 tokens, with the rest of the prompt and its answer 5,120, and the model's "
        "window is 2,048",
        "judge them in a tree with generate(..., reduce='tree', arity=9) over commute(..., associative=True), or ask "
        "the candidates for fewer tokens",
    )
    assert found(judge(24, reduce="tree", arity=9), max_model_len=2048) == []
    assert found(optimise(judge(24, reduce="tree", arity=9)).root, max_model_len=2048) == []
    assert found(judge(24, reduce="tree", arity=12), max_model_len=2048) == [("SF004", "$.query.operands[1]")]


def test_sf004_counts_samples_and_answers_without_a_length() -> None:
    root = generate(seq(commute(generate(user("Topic"), n=24)), user("Best?")))
    assert found(root, max_model_len=4096) == [("SF004", "$.query.operands[0]")]
    assert found(root, max_model_len=4096, max_tokens=100) == []
    assert found(root) == []
    (finding,) = lint(root, max_model_len=600)
    assert finding.fix.startswith("ask the candidates for fewer tokens with max_tokens, or open")


def test_sf004_documents() -> None:
    documents = [user("word " * 400) for _ in range(10)]
    (finding,) = lint(ask(*documents), max_model_len=4096)
    assert finding.fix == "leave it at 7 of them, or open the session with a larger max_model_len"
    assert found(ask(*documents[:7]), max_model_len=4096) == []
    assert found(generate(user("word " * 9000)), max_model_len=4096) == []  # no commute: too long, and not too wide


@pytest.mark.parametrize(
    "text",
    [
        "Today is 2025-05-03.",
        "You are helpful. Current date: May 3, 2025",
        "It is 2025-05-03T10:15:00Z.",
        "The time is 10:15.",
        "Today's date is Saturday, 3 May 2025.",
        "Date: 03/05/2025",
        "Timestamp: 1746267300",
        "Session ID: 8f3a-77ab2",
        "request 123e4567-e89b-12d3-a456-426614174000",
        "Log from 10:15:30 on.",
    ],
)
def test_sf005_a_head_that_changes(text: str) -> None:
    assert found(ask(SEA, head=text)) == [("SF005", "$.query.operands[0].parts[0]")]
    # Behind what stays the same it does no harm.
    assert found(ask(SEA, question=text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "You know what happened up to 2023-10-01.",
        "Answer in at most 3 sentences.",
        "The office is open from 9:00 to 17:00.",
        "The Act of 1 May 1998 applies.",
        "Write dates as YYYY-MM-DD.",
        "Ask for the session id.",
        "Do it now, in 2 steps.",
        "Ratio 16:9.",
    ],
)
def test_sf005_leaves_alone(text: str) -> None:
    assert found(ask(SEA, head=text)) == []


def test_sf006_a_node_in_text() -> None:
    answer = generate(user("Colour?"))
    assert found(generate(user(f"Is this right: {answer}"))) == [("SF006", "$.query.parts[0]")]
    assert found(generate(user(f"Is this right: {chat([('user', 'q')])!r}"))) == [("SF006", "$.query.parts[0]")]
    assert found(generate(user("Is <Generate> a tag, or <Text 12>?"))) == []


@pytest.mark.parametrize(
    "text", ["Rate {answer}.", "Rate {candidate_2}.", "{context}\n\nRate it.", "Rate {answers[0]} and { query }."]
)
def test_sf007_a_placeholder(text: str) -> None:
    assert found(generate(user(text))) == [("SF007", "$.query.parts[0]")]


@pytest.mark.parametrize(
    "text",
    [
        'Reply as {"answer": "..."}',
        "A template has {{answer}} in it.",
        "In LaTeX: \\frac{query}{x} and ${answer}",
        "A set {a, b}, or {x}.",
        "{}",
        "f{answer}",
    ],
)
def test_sf007_leaves_alone(text: str) -> None:
    assert found(generate(user(text))) == []
    assert found(generate(user(commute(fragment("{answer}"), fragment("b")), "q"))) == []


def test_sf008_an_answer_written_out() -> None:
    answer = generate(user("Colour?"))
    assert found(ask(answer, assistant("Blue."))) == [("SF008", "$.query.operands[1].operands[1].parts[0]")]
    assert found(ask(answer, seq(user("Another:"), assistant("Blue.")))) == [
        ("SF008", "$.query.operands[1].operands[1].operands[1].parts[0]")
    ]
    assert found(ask(assistant("Green."), assistant("Blue."))) == []
    assert found(ask(answer, user("Blue."))) == []
    assert found(generate(seq(user("hi"), assistant("hello"), commute(answer, answer), user("Best?")))) == []


def test_sf009_candidates_in_order() -> None:
    answer = generate(user("Colour?"))
    assert found(generate(seq(user("a"), answer, answer, user("Best?")))) == [("SF009", "$.query.operands[1]")]
    assert found(generate(seq(answer, seq(answer)))) == [("SF009", "$.query.operands[0]")]
    assert found(generate(seq(user("a"), answer, user("Sure?"), answer, user("Why?")))) == []
    assert found(generate(seq(answer, commute(answer, answer), answer, user("q")))) == []


def test_sf010_a_judge_that_cannot_be_a_tree() -> None:
    candidates = [generate(user(str(i))) for i in range(4)]
    (finding,) = lint(generate(seq(commute(*candidates), user("Best?")), reduce="tree"))
    assert finding == Finding(
        "SF010",
        "$",
        "reduce='tree': the author does not say that the judgement may be taken over parts of the operands first",
        "if it may, say commute(..., associative=True)",
    )
    with pytest.raises(QueryError, match="the author does not say"):
        optimise(generate(seq(commute(*candidates), user("Best?")), reduce="tree"))
    assert found(judge(4, reduce="tree")) == []


def test_a_finding_in_words() -> None:
    (finding,) = lint(ask(user("Document 3: the sky."), SEA))
    assert str(finding) == (
        "$.query.operands[1].operands[0].parts[0]: SF001 'Document 3:' speaks of an order, and the operands of its "
        "commute may stand in any; leave it out, name operands by what they are (a title, an id), or join them with seq"
    )


def test_checks_can_be_left_out() -> None:
    root = ask(user("Document 3: the sky."), SEA, head="Today is 2025-05-03.")
    assert [code for code, _ in found(root)] == ["SF001", "SF005"]
    assert [code for code, _ in found(root, ignore=["SF001"])] == ["SF005"]
    assert found(root, ignore={check.code for check in CHECKS}) == []
    assert [code for code, _ in found(root, ignore="SF005")] == ["SF001"]
    with pytest.raises(QueryError, match=r"^lint: there is no check 'SF999'; checks are SF001, SF002, .*SF010$"):
        lint(root, ignore=["SF999"])
    with pytest.raises(QueryError, match="lint: max_model_len: must be a whole number at least 1, got 0"):
        lint(root, max_model_len=0)


def test_codes_and_their_words_are_unique() -> None:
    assert [check.code for check in CHECKS] == [f"SF{number:03}" for number in range(1, len(CHECKS) + 1)]
    assert len({check.what for check in CHECKS}) == len(CHECKS)
    assert all(check.find.__doc__ for check in CHECKS)


def test_real_documents_are_left_alone() -> None:
    documents = load_documents()
    assert len(documents) > 20
    for first in range(0, len(documents), 4):
        some = documents[first : first + 4]
        as_messages = [user(document.text) for document in some]
        as_fragments = [fragment(f"{document.title}\n{document.text}", id=document.id) for document in some]
        assert found(ask(*as_messages)) == []
        assert found(generate(seq(system("s"), user(commute(*as_fragments), "What is it?")))) == []


@given(queries(max_leaves=16))
def test_any_query_can_be_checked(root: Node) -> None:
    paths = {path for path, _ in preorder(root)}
    for finding in lint(root, max_model_len=64):
        assert finding.path in paths
        assert finding.reason
        assert finding.fix


def test_what_is_no_query_is_refused() -> None:
    with pytest.raises(QueryError, match="nothing to read"):
        lint(generate(Text("")))


def test_depth() -> None:
    root: Node = user("First, a.")
    for _ in range(5_000):
        root = Seq((root, SEA))
    assert found(generate(commute(root, SEA)))[0][0] == "SF001"


def test_answers_inside_a_message() -> None:
    written = generate("Write.")
    assert found(generate(user("Judge:", commute(written, written), "Which?"))) == []
    assert found(generate(user("Judge:", written, written, "Which?"))) == [("SF009", "$.query.parts[1]")]
