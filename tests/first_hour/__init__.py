"""Kinds of new users, each typing what its page of docs/first-hour says."""
