"""What the subcommands of `softsm` do beyond their options (cli.py): one module each."""
