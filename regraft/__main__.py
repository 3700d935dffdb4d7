"""`python -m regraft`, the same as `regraft`."""

from regraft.cli import main

if __name__ == "__main__":
    main()
