"""The default run without data, network or GPU."""
