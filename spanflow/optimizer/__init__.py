"""Rewrites of queries by small laws: what a query means stays, and what it costs goes down."""
