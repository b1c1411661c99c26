"""`python -m grpo_ext`: the command line."""

from grpo_ext.cli import main

main()
