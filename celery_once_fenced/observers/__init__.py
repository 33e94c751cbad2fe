"""Observers that turn events into logs and, later, into what else people watch.  Each is imported when asked for."""
