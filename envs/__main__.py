"""Lists the worlds: python -m envs"""

import envs

for id, entry in envs.ENVS.items():
    problem = envs.missing(id)
    usable = "usable here" if problem is None else f"NOT USABLE: {problem}"
    print(f"{id:<24} {entry.about}; needs {entry.needs}; {usable}")
