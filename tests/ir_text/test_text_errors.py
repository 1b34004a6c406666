"""What is no query is shown where it goes wrong, with what was expected."""

from __future__ import annotations

import pickle

import pytest
from strategies import drawer, shelf

from spanflow.errors import QueryError
from spanflow.ir.text import QuerySyntaxError, format_text, from_text

RETRIEVERS = {"shelf": shelf, "drawer": drawer}


def error_of(source: str) -> QuerySyntaxError:
    with pytest.raises(QuerySyntaxError) as caught:
        from_text(source, filename="q.span", retrievers=RETRIEVERS)
    return caught.value


def test_the_message_shows_the_line() -> None:
    error = error_of('(seq\n  (system "Be brief.")\n  (usr "Why?"))')
    assert str(error).splitlines() == [
        "q.span:3:4: 'usr' is no operator; did you mean 'user'?",
        '   3 |   (usr "Why?"))',
        "     |    ^^^",
    ]
    assert (error.line, error.column, error.offset, error.filename) == (3, 4, 31, "q.span")
    assert isinstance(error, QueryError)
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.offset == error.offset


def test_the_marks_stand_below_wide_and_joined_characters() -> None:
    error = error_of('(user "漢字é́\t" nope)')
    _, shown, marks = str(error).splitlines()
    assert shown == '   1 | (user "漢字é́    " nope)'
    assert marks == "     | " + " " * len('(user "....e    " ') + "^^^^"


def test_of_a_long_line_the_place_is_shown() -> None:
    error = error_of('(user "' + "x" * 500 + '" 3 "' + "y" * 500 + '")')
    _, shown, marks = str(error).splitlines()
    assert len(shown) < 100
    assert shown[marks.index("^")] == "3"
    assert shown.startswith("   1 | …x")
    assert shown.endswith("y…")


#: A source with the wrong place between guillemets, and what is said about it.
PROBLEMS = [
    ("«»", 'the source is empty; expected a query, as in (generate (user "Hello"))'),
    ("; only a comment\n«»", "the source is empty"),
    ('(user "a") «(»user "b")', "expected the end: a source holds one query; join several with (seq ...)"),
    ('(user "a")«)»', "there is no '(' for this ')'"),
    ('«(»seq (user "a")', "this '(' is never closed; expected ')' before the end"),
    ('(seq\n (user "a"«]»', "expected ')' for the '(' of line 2, column 2, got ']'"),
    ("«()»", "expected an operator after '('; operators are system, user, assistant, fragment, seq, commute,"),
    ('(«"user"» "a")', "expected an operator after '(', got text; operators are"),
    ('(«gnerate» "a")', "'gnerate' is no operator; did you mean 'generate'?"),
    ('(«blah» "a")', "'blah' is no operator; operators are system"),
    ("«hello»", 'expected text in quotes or a query; write "hello" if it is text'),
    ("(user «3»)", "expected text in quotes or a query in parentheses, got the number 3"),
    ('(user «["a"]»)', "expected text in quotes or a query in parentheses, got a list"),
    ("«:n» 3", "the option :n stands outside of a query"),
    ('(generate «:temprature» 1 "a")', "generate has no option :temprature; did you mean 'temperature'?"),
    ('(commute «:k» 1 "a")', "commute has no option :k; it takes :rung, :anchor, :associative, :separator"),
    ('(seq «:n» 1 "a")', "seq has no option :n; it takes none"),
    ('(generate :n 1 "a" «:n» 2)', "generate has the option :n twice"),
    ('(generate "a" :n«)»', "expected a value for :n before this ')'"),
    ("(generate :n «:seed» 3)", "expected a value for :n, got the option :seed"),
    ('(generate «:» 3 "a")', "expected the name of an option after ':', as in :max_tokens 64"),
    ('(generate :n «300» "a")', ":n: must be a whole number from 1 to 255, got 300"),
    ('(generate :n «"2"» "a")', ":n expects a whole number, got text"),
    ('(generate :max_tokens «1.5» "a")', ":max_tokens expects a whole number, got the number 1.5"),
    ('(generate :max_tokens «0» "a")', ":max_tokens: must be a whole number at least 1, got 0"),
    ('(generate :seed «-1» "a")', ":seed: must be a whole number at least 0, got -1"),
    ('(generate :temperature «-1» "a")', ":temperature: must be a number of at least 0 (0 is greedy), got -1.0"),
    ('(generate :temperature «hot» "a")', ":temperature expects a number, got 'hot'"),
    ('(generate :top_p «0» "a")', ":top_p: must be a number above 0 and at most 1, got 0.0"),
    ('(generate :stop ["a", «3»] "a")', ":stop expects text in quotes, got the number 3"),
    ('(generate :stop «["a", ""]» "a")', ":stop[1]: an empty stop string would stop every answer at once"),
    ('(generate :reduce «treee» "a")', ":reduce expects tree, got 'treee'; did you mean 'tree'?"),
    ('(generate :schema «[1]» "a")', ':schema expects a JSON Schema, as in {"type": "object"}, got a list'),
    ('(commute :rung «moves» "a")', ":rung expects exact, moved or (repair 32), got 'moves'; did you mean 'moved'?"),
    ('(commute :rung «(repair 0)» "a")', ":rung: repair(0): repair a whole number of tokens, from 1 to 2147483647"),
    (
        '(commute :rung «(repair 2147483648)» "a")',
        ":rung: repair(2147483648): repair a whole number of tokens, from 1 to",
    ),
    ('(commute :rung «"moved"» "a")', ":rung expects exact, moved or (repair 32), got text"),
    ('(commute :anchor «heads» "a")', ":anchor expects header or head or none, got 'heads'; did you mean 'head'?"),
    ('(commute :associative «yes» "a")', ":associative expects true or false, got 'yes'"),
    ('(fragment "a" :metadata «3»)', ':metadata expects an object, as in {"page": 3}, got the number 3'),
    ('(fragment "a" :metadata {"a": «b»})', ":metadata expects plain values (text, numbers, true, false, null"),
    ('(fragment "a" :metadata {"a": 1, «"a": 2»})', ":metadata has the key 'a' twice"),
    ('(fragment "a" :metadata {«a»: 1})', 'expected a key in quotes, as in {"page": 3}'),
    ('(fragment "a" :metadata {"a" «1»})', "expected ':' after the key 'a'"),
    ('(fragment "a" :metadata {"a"«}»)', "expected ':' and a value for the key 'a' before this '}'"),
    ('(fragment "a" :metadata {"a":«}»)', "expected a value for the key 'a' before this '}'"),
    ('(fragment "a" :metadata {«:» 1})', "':' stands between a key and its value; there is no key before it"),
    ('(fragment "a" :metadata {"a": 1«,»})', "nothing stands between this comma and the '}'"),
    ('(fragment "a" :metadata {«,»})', "nothing stands before this comma; leave it out"),
    ('(fragment "a" :metadata {"a": [1 «2»]})', "expected ',' or ']'"),
    ('(fragment "a" :metadata {"a": «(»user "b")})', "a query cannot stand in a list or an object"),
    ('(seq "a"«,» "b")', "',' separates values in lists and objects; here a space does"),
    ('(fragment "a" «"b"»)', "fragment expects one text in quotes, got 2"),
    ('(fragment «(user» "b"))', "fragment expects one text in quotes, got a query"),
    ("«(generate» :n 2)", "generate expects one query or text, got none"),
    ('(generate "a" «"b"»)', "generate expects one query or text, got 2; join several with (seq ...)"),
    ('«(retrieve» "a")', "retrieve expects a retriever, as in :from name"),
    ('(retrieve :from «shlf» "a")', "there is no retriever 'shlf' (known: 'shelf', 'drawer'); did you mean 'shelf'?"),
    ('(retrieve :from «3» "a")', ":from expects the name of a retriever, got the number 3"),
    ("(seq «(commute»))", "commute: there are no operands"),
    ("«(chat»)", "chat: there are no messages"),
    ('(seq "a" «(generate» (user)))', "this generate has nothing to read"),
    ('(user (seq "a" «(user» "b")))', "a message stands inside a message of role 'user'; messages do not nest"),
    ('(seq "a" «(generate» :n 3 "b"))', "generate: n=3 asks for 3 answers where the query around it reads one"),
    ('(user «"a»\n")', "this string does not end on its line"),
    ('(user «"""»a)', 'this """ is never closed'),
    ('(user """«a»\n  b\n""")', 'a block of several lines begins on the line after its """'),
    ('(user """\n  a\n«  b»""")', 'the """ that ends a block stands alone on its line'),
    ('(user """\n  a\n« b»\n  """)', 'this line is indented less than the """ that ends the block (2 characters)'),
    ('(user """\r\n  a\\n\r\n  «\\x»\r\n  """)', "unknown escape"),
    ('(user "a«\\x»41")', "unknown escape; known are \\n \\r"),
    ('(user "«\\ud800»")', "\\ud800 is half of a surrogate pair, which no tokenizer can read"),
    ('(user "«\\U00110000»")', "\\U00110000 is beyond the last character"),
    ("(user «'a'»)", 'text stands between double quotes: "..."'),
    ("«#» a comment", "'#' begins nothing here; a comment begins with ';'"),
    ('(generate :n «007» "a")', "this is no number; numbers look like 3, -3, 0.7 or 1e-3"),
    ('(generate :n «3x» "a")', "this is no number"),
    ('(generate :temperature «1e999» "a")', "this number is larger than any that can be used"),
    (f'(generate :seed «{"9" * 5000}» "a")', "this number has 5,000 digits; at most 4,000 are read"),
    (f'(generate :temperature «{"9" * 400}» "a")', "expects a number that is not as large, got a number of 400 digits"),
    ('(user«\xa0»"a")', "U+00A0 is no space here; use plain spaces, or put it into a string"),
    ('(user "«\ud800»")', "U+D800 is half of a surrogate pair, which no tokenizer can read; decode the source"),
    ('(user "«\x00»")', "U+0000 (a control character) does not show; in a string write \\u0000 for it"),
    ('(user "a") ; «\u202e» (user', "U+202E (RIGHT-TO-LEFT OVERRIDE) does not show"),
    ('(user «\r»"a")', "U+000D (a control character) does not show; in a string write \\r for it"),
    ("\ufeff«\ufeff»", "expected text in quotes or a query"),
    ('(fragment "a" :metadata {"a": ' + "[" * 100 + "«[]»" + "]" * 100 + "})", ":metadata is nested more than 100"),
]


@pytest.mark.parametrize(("marked", "problem"), PROBLEMS, ids=[problem[:40] for _, problem in PROBLEMS])
def test_each_problem_is_shown_where_it_is(marked: str, problem: str) -> None:
    start = marked.index("«")
    source = marked.replace("«", "", 1).replace("»", "", 1)
    error = error_of(source)
    assert problem in error.problem
    assert error.offset == start
    before = source[:start]
    assert error.line == before.count("\n") + 1
    assert error.column == start - (before.rfind("\n") + 1) + 1
    marks = str(error).rpartition("\n")[2].count("^")
    if marked.index("»") - 1 - start < 40:
        assert marks == max(1, len(source[start : marked.index("»") - 1].rstrip()))
    with pytest.raises(QuerySyntaxError):
        format_text(source + ("" if "retriever '" not in problem else ")"))


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the source has 16,777,217 characters, and at most 16,777,216" in error_of(" " * (2**24 + 1)).problem
    assert "nested more than 100,000 levels deep" in error_of("(seq" * 100_001).problem
    monkeypatch.setattr("spanflow.ir.text.parser.MAX_NODES", 100)
    monkeypatch.setattr("spanflow.ir.text.reader._MAX_FORMS", 300)
    assert from_text(f"(seq {'(user) ' * 99})") == from_text(f"(seq {'(U)' * 99})")
    error = error_of(f"(seq {'(user) ' * 100})")
    assert "the query has more than 100 nodes; split it" in error.problem
    assert error.column == 6 + 99 * 7
    assert (
        "the source has more than 300 words, strings and brackets" in error_of(f"(generate :stop [{'1,' * 300}").problem
    )


def test_a_source_is_text() -> None:
    with pytest.raises(QueryError, match="the source must be text, got bytes; decode it first"):
        from_text(b'(user "a")')  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="the source must be text, got NoneType"):
        format_text(None)  # type: ignore[arg-type]


def test_without_retrievers_none_is_found() -> None:
    with pytest.raises(QuerySyntaxError, match=r"there is no retriever 'shelf': none were given; pass retrievers="):
        from_text('(retrieve :from shelf "a")')


def test_what_looks_odd_and_is_right() -> None:
    assert from_text('\ufeff(U"a""b")') == from_text('(user "a" "b")')
    assert from_text('(x "a" (✶ (+ "b")))') == from_text('(seq "a" (seq (commute "b")))')
    assert from_text('(F "a" :id "x")') == from_text('(fragment :id "x" "a")')
    assert from_text('"\\ud83d\\ude42 \\/ \\U0001F642"') == from_text('"🙂 / 🙂"')
    assert from_text('"""no\\tlines"""') == from_text('"no\tlines"'.replace("\t", "\\t"))
    assert from_text('"""\n    a\n\n      b\n    """') == from_text('"a\\n\\n  b"')
    assert from_text('""') == from_text('"""\n"""')
