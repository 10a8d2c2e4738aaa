"""Functions on tensors: the reference in plain torch is the specification."""
