"""The `tandem` command. Every heavy import happens inside the command that needs it, so that `--help` is instant."""
