"""The decoder and its builder."""
