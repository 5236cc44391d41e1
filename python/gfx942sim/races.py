"""Stub: being written."""


class LdsRace: ...


class LdsRaces(Exception): ...


class RaceCheck:
    def __init__(self, code, kernel): ...

    def lds(self, *args): ...

    def vmem(self, *args): ...

    def barrier(self, *args): ...

    def found(self):
        return []
