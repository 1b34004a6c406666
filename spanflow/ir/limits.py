"""How large a query may be where it is read from text or JSON, or written to them."""

#: Characters of one query.
MAX_CHARS = 2**24
#: Nodes of one query, counted at each place where they stand.
MAX_NODES = 1_000_000
#: Levels of one query.
MAX_DEPTH = 100_000
