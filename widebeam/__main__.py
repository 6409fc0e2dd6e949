"""`python -m widebeam` is the command line."""

from widebeam.cli import main

main()
