"""The ``prism`` command. It parses, prints and exits; it computes nothing itself.

``entry`` is what the console script calls, ``main`` finds the command; ``commands/`` holds one small module a
subcommand, imported when it is called.
"""
