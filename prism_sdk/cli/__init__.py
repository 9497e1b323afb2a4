"""The ``prism`` command. It parses, prints and exits; it computes nothing itself.

``main`` is the entry, ``commands/`` holds one small module a subcommand, imported when it is called.
"""
