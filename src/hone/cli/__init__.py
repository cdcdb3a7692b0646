"""The `hone` command: the command line and its terminal; nothing imports it but __main__."""
