"""Run the command line as `python -m mezzo`."""

from __future__ import annotations

from mezzo.cli import main

if __name__ == "__main__":
    main()
