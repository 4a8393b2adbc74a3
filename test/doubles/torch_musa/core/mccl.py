"""Version of the collective library."""


def version() -> tuple[int, int, int]:
    return (2, 11, 4)
