"""`python -m batchwright` is the command `batchwright`."""

from batchwright.cli import main

if __name__ == "__main__":
    main()
