"""Observers that turn events and counters into what people watch: logs, traces, metrics.  Each is imported when asked for."""
