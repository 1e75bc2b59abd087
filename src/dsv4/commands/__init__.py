"""One module per subcommand of `dsv4`; `dsv4.cli` lists them."""
