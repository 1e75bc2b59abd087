"""`python -m dsv4` is the `dsv4` command."""

from dsv4_command import main

if __name__ == "__main__":
    main()
