"""One file per stage, each with ``run(job)``."""
