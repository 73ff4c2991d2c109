"""One file per stage, each with a class ``Stage``."""
