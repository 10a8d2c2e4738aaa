"""Training-side GTP layers: sharded weights, their gathers and gradients, optimizers, checkpoints, publishing."""
