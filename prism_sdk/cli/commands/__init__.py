"""One module a subcommand of ``prism``, each with a ``command`` object. No logic that a library user could want."""
