"""One question over retrieved documents, whose order does not matter. Run with `spanflow run examples/rag/query.py`."""

from spanflow import generate, retrieve, seq, system, user
from spanflow.demo.corpus import Bm25Retriever

QUESTION = "Who built the first lighthouse on the Eddystone Rocks?"

query = generate(
    seq(
        system("Answer the question from the documents, in a few words."),
        user("Documents:\n\n", retrieve(Bm25Retriever(), QUESTION, k=4), f"Question: {QUESTION}"),
    ),
    max_tokens=24,
)
