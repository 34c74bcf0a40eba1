"""``python -m autopar``."""

from autopar.cli import main

main()
