"""``python -m spcl``, for launchers such as torchrun."""

from spcl.cli import main

main()
