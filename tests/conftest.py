"""What holds for all tests: a thread for each process, where detective's story file lies, a real model."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; pytest runs two processes

ROM = Path(__file__).parent.parent.parent / "shared/data/detective.z5"
if ROM.exists():
    os.environ.setdefault("DETECTIVE_ROM", str(ROM))


@pytest.fixture(scope="session")
def smollm(tmp_path_factory):
    """The folder of a real model, SmolLM2-135M-Instruct; without its packages the test is skipped."""
    import smollm

    return smollm.folder(tmp_path_factory.mktemp("smollm"))
