"""Serving: rows and costs in `scheduler`, requests over HTTP in `api`."""
