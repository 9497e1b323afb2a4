"""The core runtime: starts ranks, switches them, meets them with virtual peers; `launcher` is the way in.

Kept empty of imports: the entry point that torch calls lives here, and nothing may load before it decides to act.
"""
