"""`python -m skipless` is the `skipless` command."""

from skipless.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
