"""What mlmsub knows, without I/O: stages, profiles, model confs, values, rendering.

Nothing here opens a file, reads the clock or looks at ``os.environ``.
"""
