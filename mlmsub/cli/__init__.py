"""The command line: the only code that prints or exits."""
