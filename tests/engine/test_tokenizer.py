"""A model's tokenizer without its engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engine.tiny_llama import save_tiny_model

from spanflow.engine.tokenizer import load_hf_tokenizer
from spanflow.errors import EngineUnavailable, ModelError


@pytest.mark.torch
def test_the_tokenizer_and_the_window_of_a_directory(tmp_path: Path) -> None:
    tokenizer, window = load_hf_tokenizer(save_tiny_model(tmp_path / "tiny"))
    assert tokenizer.encode("w0 w1", add_special_tokens=False) == [3, 4]
    assert window == 8192


@pytest.mark.torch
def test_what_an_engine_is_told_about_the_tokenizer_holds_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    model, asked = save_tiny_model(tmp_path / "tiny"), []

    def from_pretrained(place: str, **options: object) -> None:
        asked.append((place, options))

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    load_hf_tokenizer(model, options={"max_model_len": 7})
    load_hf_tokenizer(model, options={"tokenizer": "a/b", "revision": "r1", "trust_remote_code": True})
    load_hf_tokenizer(model, options={"tokenizer_revision": "r2", "revision": "r1", "trust_remote_code": False})
    load_hf_tokenizer(model, options={"tokenizer_mode": "hf", "download_dir": "there"})
    assert asked == [
        (str(model), {}),
        ("a/b", {"revision": "r1", "trust_remote_code": True}),
        (str(model), {"revision": "r2", "trust_remote_code": False}),
        (str(model), {"cache_dir": "there"}),
    ]
    with pytest.raises(EngineUnavailable, match=r"tokenizer_mode 'mistral': that tokenizer is vLLM's own"):
        load_hf_tokenizer(model, options={"tokenizer_mode": "mistral"})


@pytest.mark.torch
def test_a_tokenizer_that_does_not_load_is_named_with_its_place(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "tiny")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=f"the tokenizer of model '{directory}' does not load from {directory}"):
        load_hf_tokenizer(str(directory))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        EngineUnavailable, match=r"the tokenizer of smollm2 needs transformers; run python3 \.ci/environment\.py"
    ):
        load_hf_tokenizer("smollm2")
