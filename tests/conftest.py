"""Where the tests find a story file for the world detective, unless $DETECTIVE_ROM says so."""

import os
from pathlib import Path

ROM = Path(__file__).parent.parent.parent / "shared/data/detective.z5"
if ROM.exists():
    os.environ.setdefault("DETECTIVE_ROM", str(ROM))
