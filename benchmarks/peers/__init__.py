"""One adapter for each server or library that is measured beside ours; each runs in an environment of its own."""
