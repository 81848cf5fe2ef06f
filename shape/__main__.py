"""`python -m shape NAME ...` is `shape NAME ...`."""

from shape.cli.main import main

if __name__ == "__main__":
    main()
