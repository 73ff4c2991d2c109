"""Training data: records, answers, packed rows."""
