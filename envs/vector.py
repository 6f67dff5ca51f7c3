"""Several worlds of one kind, stepped together."""

import envs


class VecTextEnv:
    """`n` worlds in lockstep, in this process; every argument and result is a list with one entry per world.

    A world that has ended stays as it is until the next `reset`: nothing starts by itself.
    """

    def __init__(self, id: str, n: int, **options):
        self.envs = [envs.make(id, **options) for _ in range(n)]
        self.observations = [""] * n
        self.terminated = [False] * n
        self.truncated = [False] * n

    def __len__(self) -> int:
        return len(self.envs)

    def reset(
        self, seeds: list[int | None] | None = None, indices: list[int | None] | None = None
    ) -> tuple[list[str], list[dict]]:
        """Starts all worlds anew: `seeds` for their generators, `indices` of the tasks; None leaves it to the world."""
        seeds = self._one_each("seeds", seeds)
        indices = self._one_each("indices", indices)
        results = [
            self._call(i, "reset", seed=seed, options={} if index is None else {"index": index})
            for i, (seed, index) in enumerate(zip(seeds, indices, strict=True))
        ]
        self.observations = [observation for observation, _ in results]
        self.terminated = [False] * len(self)
        self.truncated = [False] * len(self)
        return list(self.observations), [info for _, info in results]

    def step(self, actions: list[str | None]) -> tuple[list[str], list[float], list[bool], list[bool], list[dict]]:
        """Takes one action in every world; those that have ended, or whose action is None, are left alone.

        For these the observation and the flags are the last ones, the reward is 0 and the info empty.
        """
        rewards: list[float] = [0.0] * len(self)
        infos: list[dict] = [{} for _ in self.envs]
        for i, action in enumerate(self._one_each("actions", actions)):
            if action is not None and not (self.terminated[i] or self.truncated[i]):
                self.observations[i], rewards[i], self.terminated[i], self.truncated[i], infos[i] = self._call(
                    i, "step", action
                )
        return list(self.observations), rewards, list(self.terminated), list(self.truncated), infos

    def close(self) -> None:
        for world in self.envs:
            world.close()

    def _one_each(self, name: str, values: list | None) -> list:
        values = [None] * len(self) if values is None else list(values)
        if len(values) != len(self):
            raise ValueError(f"{name}: {len(values)} for {len(self)} worlds")
        return values

    def _call(self, i: int, method: str, *args, **kwargs):
        """Calls a method of world `i`; whatever goes wrong is reported with the number of the world."""
        try:
            return getattr(self.envs[i], method)(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"world {i} ({self.envs[i].id}), {method}: {error}") from error
