"""Serving: rows and steps in `scheduler`, requests over HTTP in `api`."""
