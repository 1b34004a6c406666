"""The golden texts' queries, as an author would build them in Python."""

from __future__ import annotations

from spanflow import assistant, chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.ir.nodes import Node


def archive(query: str) -> list[str]:
    """A retriever with a name of its own in the golden texts."""
    return []


ARCHIVES = {"the city archive": archive}


def rag() -> Node:
    documents = commute(
        fragment(
            "The lighthouse of Hook Head was lit by monks.\n\n  (They carried coal up the rock.)",
            id="hook",
            metadata={"source": "lighthouses.pdf", "page": 3},
        ),
        fragment("The lighthouse of Pharos stood on an island.", id="pharos"),
        rung="repair(32)",
        anchor="header",
    )
    return generate(
        seq(
            system("Answer from the documents. Say 'unknown' where they do not tell."),
            user(documents, "Which one did monks light?"),
        ),
        max_tokens=64,
    )


def judge() -> Node:
    candidates = generate(
        user("A name for a lighthouse keeper's cat?"), max_tokens=16, temperature=0.7, top_p=0.95, n=8
    )
    return generate(
        seq(
            system("Pick the best name."),
            commute(candidates, assistant("Fresnel"), rung="moved", anchor="none", associative=True),
            user("Which one?"),
        ),
        model="judge/8b",
        max_tokens=8,
        stop=["\n", "."],
        seed=7,
        reduce="tree",
        arity=3,
    )


def schema() -> Node:
    answer = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["city", "year"],
    }
    return chat(
        [
            system("Answer in JSON."),
            retrieve(archive, "founding years", k=4, rung="exact", anchor="head"),
            commute("bare text", '\x00\u202e, "quotes", \\ and 漢字 🙂', separator="\n---\n"),
            user("When was it founded?"),
        ],
        temperature=0.5,
        stop="\n\n",
        schema=answer,
    )


GOLDEN = {"rag": rag, "judge": judge, "schema": schema}
