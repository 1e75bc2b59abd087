"""One module per subcommand of `dsv4`; dsv4_command has their options."""
