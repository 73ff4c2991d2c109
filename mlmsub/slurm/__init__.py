"""What Slurm's commands take and print; nothing else in mlmsub knows their text."""
