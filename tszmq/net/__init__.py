"""Sockets, threads and locks."""
