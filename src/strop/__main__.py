"""`python -m strop` is `strop`."""

from strop.cli import main

main()
