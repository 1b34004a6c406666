"""The JSON form of span queries, `{"spanflow": 1, "query": ...}`, and the forms of spnl."""

from __future__ import annotations

from spanflow.ir.json.model import json_schema
from spanflow.ir.json.read import from_json
from spanflow.ir.json.spnl_parts import SpnlDocument
from spanflow.ir.json.spnl_read import from_spnl
from spanflow.ir.json.spnl_write import to_spnl
from spanflow.ir.json.write import to_json, to_json_text

__all__ = ["SpnlDocument", "from_json", "from_spnl", "json_schema", "to_json", "to_json_text", "to_spnl"]
