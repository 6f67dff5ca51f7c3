"""Lists the worlds, and which scripts take which: python -m envs"""

import envs

for id, entry in envs.ENVS.items():
    problem = envs.missing(id)
    usable = "usable here" if problem is None else f"NOT USABLE: {problem}"
    print(f"{id:<24} {entry.about}; for {entry.scripts}; needs {entry.needs}; {usable}")
print(f"module:Class             one of your own (docs/your_world.md); for {envs.ONLY_GROWING}")
