"""`python -m simpart` is the command line."""

from simpart.cli import main

if __name__ == "__main__":
    main()
