"""The HTTP process and the command line.  Nothing here imports torch but the engine process and the demo."""
