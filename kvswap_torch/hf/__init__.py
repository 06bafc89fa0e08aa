"""The only room that knows transformers: its cache, attention and hooks around a session."""
