"""The `ork` command: `main` and one file per subcommand, each with `add(parser)` and `run(args)`."""
