"""Runs the small trainer as a module. It holds nothing itself: what a program runs as `__main__` cannot be wrapped."""

from __future__ import annotations

from prism_sdk.testing.trainer import main

if __name__ == "__main__":
    main()
