"""``python -m kvcore`` is the command line."""

from kvcore.cli import main

if __name__ == "__main__":
    main()
