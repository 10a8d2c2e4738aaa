"""The paged key/value cache: block accounting (torch-free) and the pool of tensors."""
