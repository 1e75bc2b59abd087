"""The work of softsm's subcommands, one module each; cli.py has their options."""
