"""``python -m spcl``: the command, for launchers such as torchrun."""

from spcl.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
