"""The serving loop: scheduling (torch-free), model steps, and the process around them."""
