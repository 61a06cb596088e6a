"""The page at GET /ui: a chat and a live view of the engine, static files without dependencies."""
