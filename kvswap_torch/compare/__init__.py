"""Methods side by side on questions of a user's own: ``kvswap compare``."""
