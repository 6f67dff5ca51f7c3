"""What holds for all tests: a thread for each process, and where the story file of the world detective lies."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; pytest runs two processes

ROM = Path(__file__).parent.parent.parent / "shared/data/detective.z5"
if ROM.exists():
    os.environ.setdefault("DETECTIVE_ROM", str(ROM))
