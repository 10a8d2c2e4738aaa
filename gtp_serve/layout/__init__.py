"""Integer geometry of stored and wanted tensors; torch-free."""
