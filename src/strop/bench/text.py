"""How durations and sizes read."""


def duration(nanoseconds: float) -> str:
    for limit, unit in ((1e3, "ns"), (1e6, "µs"), (1e9, "ms")):
        if nanoseconds < limit:
            return f"{nanoseconds / limit * 1e3:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def size(count: float) -> str:
    for limit, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB")):
        if count < limit:
            return f"{count / limit * 1e3:.3g} {unit}"
    return f"{count / 1e9:.3g} GB"
