"""Lists the worlds: python -m envs"""

import envs

for id, entry in envs.ENVS.items():
    problem = envs.missing(id)
    print(
        f"{id:<24} {entry.about}; needs {entry.needs}; {'usable here' if problem is None else 'NOT USABLE: ' + problem}"
    )
