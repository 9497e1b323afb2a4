"""What importers and exporters of other trace formats share: finding files of ranks, and reading options.

It knows no format; the plugins do.
"""
