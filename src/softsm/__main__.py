"""`python -m softsm` is the console script `softsm`."""

from softsm.cli import main

if __name__ == "__main__":
    main()
