"""The version of this distribution, for packaging and for what it writes. Not that of the format."""

__version__ = "0.1.0"
