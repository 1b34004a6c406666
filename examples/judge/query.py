"""Eight answers, and a judge that takes their KV over. Run with `spanflow run examples/judge/query.py`."""

from spanflow import commute, generate, seq, system, user

candidate = generate(
    seq(system("You are a copywriter."), user("Write one sentence that sells a bicycle with a basket.")),
    max_tokens=48,
    temperature=0.8,
    n=8,
)

query = generate(
    seq(
        system("You are a strict judge of advertising."),
        commute(candidate),
        user("Which of the sentences above is the best? Quote it and say why in a few words."),
    ),
    max_tokens=64,
)
