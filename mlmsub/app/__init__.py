"""The verbs: one module each, between the command line and the rooms below. Nothing here prints or exits."""
