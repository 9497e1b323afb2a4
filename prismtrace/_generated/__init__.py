"""Holds code that spec/generate.py writes. Does not hold anything written by hand."""
