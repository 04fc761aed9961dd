"""`python -m trimtab`: the same door as the `trimtab` command; torchrun starts processes through it."""

from trimtab.cli import main

main()
