"""Span queries: say which parts of a prompt commute, and reuse their KV cache anywhere."""
