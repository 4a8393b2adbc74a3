"""The ``musa-titan`` command. Its libraries are the extra ``cli``; ``import musa_titan`` needs none of them."""

from __future__ import annotations

import sys

from musa_titan.patching.spec import MusaTitanError


def main() -> None:
    """Run the command line; an error that the user can act on is one line on stderr and exit code 2."""
    try:
        from musa_titan.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _stop(f"the command line needs {error.name}: pip install 'musa-titan[cli]'")
    try:
        app(prog_name="musa-titan")
    except MusaTitanError as error:
        _stop(str(error))


def _stop(message: str) -> None:
    print(f"musa-titan: error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
