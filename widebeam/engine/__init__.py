"""Requests in, ranked sequences out."""
